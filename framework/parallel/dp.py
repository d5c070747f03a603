"""nn.DataParallel: one process, which cuts each micro-batch over its devices."""

from torch import nn

from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.runtime.log import LOGGER


def dp(model: nn.Module, *, world: World, forward: Forward, num_devices: int | None) -> Engine:
    """Run the model on the CUDA devices of this process; with fewer than two devices, run the model unchanged."""
    model.to(world.device)
    if len(world.devices) > 1:
        return Engine(module=model, model=nn.DataParallel(model, device_ids=world.devices), forward=forward)
    LOGGER.info("parallel=dp: there is one device (%s), so the model runs as with parallel=single", world.device)
    return Engine(module=model, forward=forward)
