"""ZeRO-1: DistributedDataParallel whose optimizer state is spread over the processes."""

import torch
import torch.distributed as dist
from torch import nn

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.optim.groups import BuildOptimizer, MakeOptimizer, Trainable
from framework.optim.optimizers import stand_in
from framework.parallel.ddp import replicated
from framework.parallel.invariant import invariant


def zero(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    bucket_cap_mb: int,
    gradient_as_bucket_view: bool,
    static_graph: bool,
    find_unused_parameters: bool,
    bitwise: int | None = None,
) -> Engine:
    """Replicate the model; each process updates the parameters that it owns and sends them to the others. Collective.

    With `bitwise`, the gradients of micro-batches of that size are summed along a tree.

    torch's ZeroRedundancyOptimizer does the same, but keeps its state by position in a partition of the world; here a
    parameter's state has the parameter's name, as everywhere, and any optimizer will do.
    Source: Rajbhandari et al. 2020, "ZeRO", stage 1.
    """
    if bitwise is not None:
        return invariant(model, world=world, forward=forward, micro_batch_size=bitwise, make_optimizer=owned(world))
    return replicated(
        model,
        world=world,
        forward=forward,
        mesh=world.mesh(replicate=replicate),
        make_optimizer=owned(world),
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
    )


def owned(world: World) -> MakeOptimizer:
    """Return the way to build an optimizer of the parameters that this rank owns, which sends them to the others."""

    def make_optimizer(build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        owners = owners_of(trained, num_ranks=world.world_size)
        mine = [item for item, owner in zip(trained, owners) if owner == world.rank]
        optimizer = build(mine or stand_in(world.device))  # there may be more ranks than parameters

        def share(*_: object) -> None:
            sent = [dist.broadcast(t.parameter.data, src=o, async_op=True) for t, o in zip(trained, owners)]
            for work in sent:
                work.wait()

        optimizer.register_step_post_hook(share)
        return optimizer

    return make_optimizer


def owners_of(trained: list[Trainable], *, num_ranks: int) -> list[int]:
    """Return the rank that updates each parameter: the largest first, each to the rank with the least so far."""
    loads, owners = [0] * num_ranks, [0] * len(trained)
    for index in sorted(range(len(trained)), key=lambda i: -trained[i].parameter.numel()):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += trained[index].parameter.numel()
    return owners
