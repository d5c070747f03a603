"""A parameter server: rank 0's process holds the parameters and the optimizer; every rank sends it gradients over RPC."""

from typing import Literal

import torch
from torch import nn

from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.engine.seam import Demands


def parameter_server(
    model: nn.Module, *, world: World, forward: Forward, replicate: int | None, mode: Literal["sync", "async"]
) -> Engine:
    """Replicate the model; rank 0 is the server. One process runs without a server. Collective."""
    mesh = world.mesh(replicate=replicate)
    model.to(world.device)
    if world.world_size == 1:
        return Engine(module=model, forward=forward, mesh=mesh)
    # imported here, because a build of torch may have no RPC
    if mode == "async":
        from extras.parameter_server.asynchronous import Hogwild

        return Hogwild(model, forward=forward, mesh=mesh, world=world)
    from extras.parameter_server.synchronous import Synchronous

    return Synchronous(model, forward=forward, mesh=mesh, world=world)


def exact_options(*, mode: str, **options: object) -> dict[str, object] | None:
    """Return the options with which this strategy computes the same as one process; None for mode=async, which never does."""
    return {"mode": mode, **options} if mode == "sync" else None


def problems(model: nn.Module, *, demands: Demands, replicate: int, mode: str, **others: object) -> list[str]:
    """Refuse a torch build without RPC; with mode=async, also what needs the same parameters on all ranks after each step."""
    if replicate == 1:
        return []
    if not torch.distributed.rpc.is_available():
        return ["this PyTorch build has no torch.distributed.rpc; ddp computes the same as mode=sync"]
    if demands.averages_itself:
        return ["the optimizer averages the weights itself, but only rank 0 has them; take ddp or fsdp"]
    if demands.turns:
        return ["optimizer.turns: has several optimizers, but the server has one (parallel=ddp, zero or fsdp)"]
    if mode != "async":
        return []
    at_odds = {
        **dict([demands.averages] if demands.averages is not None else []),
        "part": ", ".join(demands.parts) or None,
        "trainer.sync_batchnorm": "true" if demands.sync_batchnorm else None,
        "trainer.divergence.action": demands.recovers,
        "precision": "fp16 (its loss scale needs the global norm of every step)" if demands.scales_loss else None,
    }
    return [f"{key}: {value}, but under parallel.mode=async each process has different weights (parallel.mode=sync for that)"
            for key, value in at_odds.items() if value is not None]  # fmt: skip
