"""One process, one device."""

from torch import nn

from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.parallel.invariant import invariant


def single(model: nn.Module, *, world: World, forward: Forward, bitwise: int | None = None) -> Engine:
    """Run the model as it is; with `bitwise`, sum the gradients of micro-batches of that size along a tree."""
    if bitwise is not None:
        return invariant(model, world=world, forward=forward, micro_batch_size=bitwise)
    model.to(world.device)
    return DataParallelEngine(model, forward=forward)
