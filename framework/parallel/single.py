"""One process, one device."""

from torch import nn

from framework.engine import DataParallelEngine, Engine, Forward
from framework.parallel.invariant import invariant
from framework.world import World

__all__ = ["single", "invariant"]


def single(model: nn.Module, *, world: World, forward: Forward) -> Engine:
    """Run the model as it is."""
    model.to(world.device)
    return DataParallelEngine(model, model=model, forward=forward)
