"""One process, one device."""

from torch import nn

from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.parallel.invariant import invariant

__all__ = ["single", "invariant"]


def single(model: nn.Module, *, world: World, forward: Forward) -> Engine:
    """Run the model as it is."""
    model.to(world.device)
    return DataParallelEngine(model, model=model, forward=forward)
