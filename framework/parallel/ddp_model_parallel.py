"""DistributedDataParallel over model parallelism: each replica is one process with its layers on several devices."""

from torch import nn
from typing_extensions import Unpack

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.parallel.ddp import DDPOptions, replicated
from framework.parallel.model_parallel import place
from framework.runtime.log import LOGGER


def ddp_model_parallel(
    model: nn.Module, *, world: World, forward: Forward, replicate: int | None, num_devices: int, **options: Unpack[DDPOptions]
) -> Engine:
    """Place the model on the devices of each process (process r with two devices has 2r and 2r + 1). Collective."""
    layout = place(model, devices=world.devices, example=forward.example)
    if world.rank == 0:
        LOGGER.info("parallel=ddp+mp: in each process %s", layout)
    return replicated(model, world=world, forward=forward, mesh=world.mesh(replicate=replicate), **options)
