"""Several pipelines in parallel: each pipeline has its own samples, and their gradients are summed."""

from torch import nn

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.parallel.first_weights import fills
from framework.parallel.pipeline import exact_options, problems
from framework.parallel.pipelining.engine import PipelineEngine
from framework.parallel.pipelining.schedules import ScheduleName
from framework.parallel.pipelining.sent import SendDtype
from framework.parallel.pipelining.times import Balance

__all__ = ["ddp_pipeline", "exact_options", "problems"]  # the layers are cut as in `pipeline`


@fills
def ddp_pipeline(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    pipeline: int | None,
    schedule: ScheduleName,
    send_dtype: SendDtype = None,
    balance: Balance = "operations",
) -> Engine:
    """Cut the model along the inner axis of the mesh, and replicate the stages along the outer axis. Collective."""
    mesh = world.mesh(replicate=replicate, pipeline=pipeline)
    return PipelineEngine(
        model, mesh=mesh, world=world, forward=forward, schedule=schedule, send_dtype=send_dtype, balance=balance
    )
