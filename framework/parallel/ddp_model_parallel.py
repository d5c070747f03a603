"""DistributedDataParallel over model parallelism: each replica is one process, whose layers are on several devices."""

from torch import nn

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.parallel.ddp import replicated
from framework.parallel.model_parallel import place
from framework.runtime.log import LOGGER


def ddp_model_parallel(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    num_devices: int,
    bucket_cap_mb: int,
    gradient_as_bucket_view: bool,
    static_graph: bool,
    find_unused_parameters: bool,
) -> Engine:
    """Lay the model out over the devices of each process (2r and 2r + 1 of process r, if it has two). Collective."""
    layout = place(model, devices=world.devices, example=forward.example)
    if world.rank == 0:
        LOGGER.info("parallel=ddp+mp: in each process %s", layout)
    return replicated(
        model,
        world=world,
        forward=forward,
        mesh=world.mesh(replicate=replicate),
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
    )
