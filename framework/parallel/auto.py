"""Automatic: the plainest strategy under which what a process holds of the model fits into its memory."""

import os
from typing import Any

import torch
from torch import nn

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.parallel.ddp import ddp
from framework.parallel.fsdp import fsdp
from framework.parallel.single import single
from framework.parallel.zero import zero
from framework.runtime.log import LOGGER

_GIB = 2**30


def auto(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    memory_gib: float | None,
    bucket_cap_mb: int,
    gradient_as_bucket_view: bool,
    find_unused_parameters: bool,
    reshard_after_forward: bool,
) -> Engine:
    """Run the model as `ddp` if it fits, else as `zero`, else as `fsdp`; in one process as it is. Collective."""
    budget = memory_gib * _GIB if memory_gib is not None else _memory(world) / 2  # the rest is for activations
    budget = min(world.agreement.gather(budget))
    choice, held = choose(model, num_ranks=world.world_size, budget=budget)
    if world.rank == 0:
        LOGGER.info("parallel=auto: %s, with %.2g GiB of parameters, gradients and optimizer state in each process",
                    choice, held / _GIB)  # fmt: skip
    if held > budget and world.rank == 0:
        LOGGER.warning("that is more than the %.2g GiB which each process has for them: take more processes", budget / _GIB)
    given: dict[str, Any] = {"world": world, "forward": forward}
    if choice == "single":
        return single(model, **given)
    if choice == "fsdp":
        given |= {"param_dtype": None, "reduce_dtype": None, "cpu_offload": False}
        return fsdp(model, shard=replicate, reshard_after_forward=reshard_after_forward, **given)
    given |= {"replicate": replicate, "bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": gradient_as_bucket_view,
              "static_graph": False, "find_unused_parameters": find_unused_parameters}  # fmt: skip
    return zero(model, **given) if choice == "zero" else ddp(model, compression=None, **given)


def choose(model: nn.Module, *, num_ranks: int, budget: float) -> tuple[str, float]:
    """Return the plainest strategy of which a process holds at most `budget` bytes, fsdp at the worst, and how many it holds.

    Counted are parameters, gradients and an optimizer state of twice the trained parameters, which is AdamW's.
    """
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    if num_ranks == 1:
        return "single", whole + 3 * trained
    held = {
        "ddp": whole + 3 * trained,
        "zero": whole + trained + 2 * trained / num_ranks,
        "fsdp": (whole + 3 * trained) / num_ranks,
    }
    fitting = [name for name, size in held.items() if size <= budget]
    choice = fitting[0] if fitting else "fsdp"
    return choice, held[choice]


def _memory(world: World) -> float:
    """Return the bytes of this process's device, or its share of the machine's memory."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world.local_world_size
