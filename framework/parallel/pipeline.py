"""Pipeline parallelism: the model's layers are cut into stages, one or more for each process; micro-batches go through them."""

from collections import Counter
from typing import Annotated, Literal

from annotated_types import Ge
from torch import nn

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Demands, Engine
from framework.modules.parts import chain_of
from framework.modules.trace import traced
from framework.parallel.first_weights import fills
from framework.parallel.pipelining.chain import stray_parameters, weighty
from framework.parallel.pipelining.engine import PipelineEngine
from framework.parallel.pipelining.own_forward import OwnForward, Uncut
from framework.parallel.pipelining.pipedream import DRAIN_EVERY, PipeDream, pipedream_problems
from framework.parallel.pipelining.schedules import KINDS, ScheduleName
from framework.parallel.pipelining.sent import SendDtype
from framework.parallel.pipelining.times import Balance


@fills
def pipeline(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    pipeline: int | None,
    schedule: Literal[ScheduleName, "pipedream"],
    send_dtype: SendDtype = None,
    balance: Balance = "operations",
    drain_every: Annotated[int, Ge(1)] | None = None,
) -> Engine:
    """Cut the model over all processes. Collective."""
    mesh = world.mesh(pipeline=pipeline)
    flushed = "1f1b" if schedule == "pipedream" else schedule
    engine = PipelineEngine(
        model, mesh=mesh, world=world, forward=forward, schedule=flushed, send_dtype=send_dtype, balance=balance
    )
    if schedule != "pipedream":
        return engine
    return PipeDream(engine, world=world, forward=forward, drain_every=drain_every or DRAIN_EVERY)


def problems(
    model: nn.Module,
    *,
    demands: Demands,
    pipeline: int,
    schedule: str,
    balance: str = "operations",
    drain_every: int | None = None,
    **others: object,
) -> list[str]:
    """Return why this model cannot be cut into so many stages, or why the run cannot use these stages."""
    found = _cut_problems(model, demands=demands, pipeline=pipeline, schedule=schedule, balance=balance)
    if schedule != "pipedream":
        unused = f"drain_every={drain_every}: schedule={schedule} is empty after every step; only pipedream is drained"
        return [unused, *found] if drain_every is not None else found
    return found or pipedream_problems(model, demands=demands, drain_every=drain_every or DRAIN_EVERY)


def _cut_problems(model: nn.Module, *, demands: Demands, pipeline: int, schedule: str, balance: str) -> list[str]:
    if balance == "time" and traced(model) is None:
        return ["balance=time: runs the model on example inputs, but this dataset does not describe its inputs; take "
                "balance=operations"]  # fmt: skip
    most_models = "ddp, zero, fsdp and hsdp take most models"
    if demands.own_step:
        return [f"pipeline: runs a model once for each micro-batch, but the task has its own step; {most_models}"]
    num_stages = pipeline * (1 if schedule == "pipedream" else KINDS[schedule].stages_per_rank)
    links = chain_of(model)
    if links is None:
        return _own_forward_problems(model, num_stages=num_stages, most_models=most_models)
    if stray := stray_parameters(model, links):
        return [f"{type(model).__name__}.chain() leaves out {stray[0]}, which is in none of its modules; {most_models}"]
    uses = Counter(module for link in links for module in link.modules() if any(True for _ in module.buffers(recurse=False)))
    if shared := [module for module, count in uses.items() if count > 1]:
        return [f"{type(model).__name__}.chain() has a {type(shared[0]).__name__} in two of its modules, and several "
                f"processes would change its buffers; {most_models}"]  # fmt: skip
    if num_stages > len(weighty(links)):
        return [f"pipeline={pipeline}: makes {num_stages} stages with schedule={schedule}, and the model's chain has "
                f"{len(weighty(links))} modules with weights; take fewer, or another strategy: {most_models}"]  # fmt: skip
    return []


def exact_options(*, schedule: str, **options: object) -> dict[str, object] | None:
    """Return the options with which this strategy computes the same as one process; None for pipedream, which never does."""
    return None if schedule == "pipedream" else {"schedule": schedule, **options, "send_dtype": None}


def _own_forward_problems(model: nn.Module, *, num_stages: int, most_models: str) -> list[str]:
    """Return why a model that does not list its modules cannot be cut at its blocks."""
    try:
        chain = OwnForward(model)
    except Uncut as error:
        return [f"{type(model).__name__} does not have chain(), which lists the modules of its forward in their order, "
                f"and its forward cannot be cut at its blocks: {error}; add chain() to the model, or take another strategy: "
                f"{most_models}"]  # fmt: skip
    if num_stages > len(chain.blocks):
        return [f"pipeline: {num_stages} stages, but {type(model).__name__} has {len(chain.blocks)} block"
                f"{'s' * (len(chain.blocks) != 1)}; take fewer, or another strategy: {most_models}"]  # fmt: skip
    return []
