"""ZeRO-1: the optimizer state of replicas is divided over the processes.

torch's ZeroRedundancyOptimizer is not used: it keeps state by position in a partition of the world; here state has the
parameter's name, for any optimizer. Source: Rajbhandari et al. 2020, "ZeRO", stage 1.
"""

import torch

from framework.distributed.buckets import broadcast_all
from framework.distributed.world import World
from framework.engine.seam import Demands
from framework.optim.optimizers import BuildOptimizer, MakeOptimizer, Trainable, stand_in


def problems(*, demands: Demands) -> list[str]:
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
