"""ZeRO-1: DistributedDataParallel with the optimizer state divided over the processes."""

import torch
from torch import nn
from typing_extensions import Unpack

from framework.distributed.buckets import broadcast_all
from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Demands, Engine
from framework.optim.optimizers import BuildOptimizer, MakeOptimizer, Trainable, stand_in
from framework.parallel.ddp import REMEDIES, DDPOptions, replicated
from framework.parallel.invariant import invariant

__all__ = ["REMEDIES", "problems", "zero"]


def zero(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    bitwise: int | None = None,
    **options: Unpack[DDPOptions],
) -> Engine:
    """Replicate the model; each process updates the parameters that it owns and sends them to the others. Collective.

    With `bitwise`, the gradients of micro-batches of that size are summed along a tree. torch's ZeroRedundancyOptimizer is not
    used: it keeps state by position in a partition of the world; here state has the parameter's name, for any optimizer.
    Source: Rajbhandari et al. 2020, "ZeRO", stage 1.
    """
    if bitwise is not None:
        return invariant(model, world=world, forward=forward, micro_batch_size=bitwise, make_optimizer=owned(world))
    mesh = world.mesh(replicate=replicate)
    return replicated(model, world=world, forward=forward, mesh=mesh, make_optimizer=owned(world), **options)


def problems(model: nn.Module, *, demands: Demands, **options: object) -> list[str]:
    """Refuse an optimizer that replaces the weights by their average: here each optimizer has only a part of the weights."""
    if demands.averages_itself:
        return ["the optimizer averages the weights itself, but in each process it has only a part of them; take ddp or fsdp"]
    return []


def owned(world: World) -> MakeOptimizer:
    """Return a function that builds an optimizer of this rank's own parameters, and sends the parameters after each step."""

    def make_optimizer(build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        owners = owners_of(trained, num_ranks=world.world_size)
        mine = [item for item, owner in zip(trained, owners) if owner == world.rank]
        optimizer = build(mine or stand_in(world.device))  # there may be more ranks than parameters

        def share(*_: object) -> None:
            broadcast_all({
                rank: [item.parameter.data for item, owner in zip(trained, owners) if owner == rank]
                for rank in range(world.world_size)
            })  # fmt: skip

        optimizer.register_step_post_hook(share)
        return optimizer

    return make_optimizer


def owners_of(trained: list[Trainable], *, num_ranks: int) -> list[int]:
    """Return the rank that updates each parameter: the largest parameter first, each to the rank with the least load so far."""
    loads, owners = [0] * num_ranks, [0] * len(trained)
    for index in sorted(range(len(trained)), key=lambda i: -trained[i].parameter.numel()):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += trained[index].parameter.numel()
    return owners
