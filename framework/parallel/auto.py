"""Automatic choice: the simplest strategy with which the model fits into the memory of each process."""

import torch
from torch import nn
from typing_extensions import Unpack

from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.engine.seam import Demands
from framework.parallel import zero
from framework.parallel.parallelize import parallelize
from framework.parallel.replica import ReplicaOptions
from framework.runtime.log import LOGGER
from framework.runtime.memory import machine_memory

_GIB = 2**30


def auto(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    memory_gib: float | None,
    reshard_after_forward: bool,
    **options: Unpack[ReplicaOptions],
) -> Engine:
    """Run the model as `ddp` if it fits, else as `zero`, else as `fsdp`; in one process, as `single`. Collective."""
    budget = memory_gib * _GIB if memory_gib is not None else _memory(world) / 2  # the rest is for activations
    budget = min(world.agreement.distinct(budget).values())  # the smallest budget of all ranks
    choice, held = choose(model, num_ranks=world.world_size, budget=budget)
    if world.rank == 0:
        LOGGER.info("parallel=auto: %s, with %.2g GiB of parameters, gradients and optimizer state in each process",
                    choice, held / _GIB)  # fmt: skip
    if held > budget and world.rank == 0:
        LOGGER.warning("that is more than the %.2g GiB that each process has for them: use more processes", budget / _GIB)
    if choice == "single":
        return parallelize(model, world=world, forward=forward)
    if choice == "fsdp":
        return parallelize(model, world=world, forward=forward, shard=replicate, reshard_after_forward=reshard_after_forward)
    return parallelize(model, world=world, forward=forward, replicate=replicate, zero=choice == "zero", **options)


def problems(model: nn.Module, *, demands: Demands, **options: object) -> list[str]:
    """Return why a strategy that `auto` may choose cannot run this model."""
    return zero.problems(demands=demands)


def choose(model: nn.Module, *, num_ranks: int, budget: float) -> tuple[str, float]:
    """Return the simplest strategy that needs at most `budget` bytes in each process (if none does, fsdp), and its bytes.

    The bytes of the parameters, of the gradients and of an optimizer state twice the size of the trained parameters (AdamW's).
    """
    whole = sum(p.numel() * p.element_size() for p in nn.Module.parameters(model))
    trained = sum(p.numel() * p.element_size() for p in nn.Module.parameters(model) if p.requires_grad)
    if num_ranks == 1:
        return "single", whole + 3 * trained
    held = {
        "ddp": whole + 3 * trained,
        "zero": whole + trained + 2 * trained / num_ranks,
        "fsdp": (whole + 3 * trained) / num_ranks,
    }
    choice = next((name for name, size in held.items() if size <= budget), "fsdp")
    return choice, held[choice]


def _memory(world: World) -> float:
    """Return the memory of this process's device in bytes; on the CPU, its share of the machine's or control group's memory."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    return machine_memory() / world.local_world_size
