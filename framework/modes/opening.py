"""The start of a run's record: the first facts that the run prints, and the facts that its loggers get."""

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from framework.build.training import Builder
from framework.config.folders import option_of
from framework.data.stream import ENDLESS
from framework.loggers.sink import RunInfo
from framework.runs.facts import say
from framework.runs.provenance import Provenance
from framework.runtime.log import LOGGER
from framework.training.loop import Trainer
from framework.training.stored_samples import stored_samples


def open_record(trainer: Trainer, build: Builder, *, places: Sequence[tuple[str, str]], **began: Any) -> None:
    """Start or continue the record, and print what runs. Collective; rank 0 needs all ranks' `places` (host and device).

    `began`: further values of the summary.
    """
    config, directory, world = build.config, build.directory, build.world
    shown = trainer.splits.loader("train") if world.rank == 0 and config.logger else None
    provenance = Provenance(directory.path)
    git = start.git if (start := provenance.latest) is not None else None
    info = RunInfo(
        directory=directory.path,
        run_id=config.run.id,
        name=config.name,
        step=trainer.progress.step,
        total_steps=trainer.plan.total_steps,
        config=config.plain(),
        group=config.run.group,
        samples=stored_samples(shown.source, shown.dataset) if shown is not None else None,
        monitor=config.checkpoint.monitor,
        direction=config.checkpoint.direction,
        best=trainer.tracker.best,
        commit=git.commit if git is not None else None,
        code={module: str(path) for module, path in provenance.files().items()},
    )
    before = directory.read_summary().get("began")
    if isinstance(before, (int, float)):  # the run was killed before its first checkpoint
        trainer.progress.began = min(trainer.progress.began, before)
    sizes: dict[str, tuple[int, bool]] = {}
    own = {name: (p.numel(), p.requires_grad) for name, p in trainer.engine.module.named_parameters()}
    for part in world.agreement.distinct(own).values():  # a stage of a pipeline has only a part of the parameters
        sizes |= part
    num_parameters = sum(size for size, _ in sizes.values())
    num_trained = sum(size for size, is_trained in sizes.values() if is_trained)
    if world.world_size > 1:
        LOGGER.debug("%s", f"process {os.getpid()} on {socket.gethostname()}, {world.device}")  # for train.log
    if world.rank == 0:
        share = "" if num_trained == num_parameters else f"{num_trained:,} of "
        steps = f"{info.total_steps} step{'s' * (info.total_steps != 1)}"
        LOGGER.info("training %s%s parameters for %s on %d x %s, in %s", share, f"{num_parameters:,}", steps,
                    world.world_size, world.device.type, directory.path)  # fmt: skip
        say(_facts(trainer, build, places))
        _warn_of_low_rate(trainer)
    trainer.recorder.open(
        info,
        world_size=world.world_size,
        parallel=option_of("parallel", config.parallel),
        parameters=num_parameters,
        total_steps=info.total_steps,
        monitor=config.checkpoint.monitor,
        **trainer.summary(),
        **began,
    )


def _facts(trainer: Trainer, build: Builder, places: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    config, plan, mesh = build.config, trainer.plan, trainer.engine.mesh
    kind = type(trainer.engine.module).__name__.removeprefix("FSDP")  # fully_shard changes it
    yield "model", f"{kind} in {config.precision.name}"
    axes = zip(mesh.mesh_dim_names or (), mesh.shape) if mesh is not None else ()
    over = "".join(f", {axis} {size}" for axis, size in axes)
    yield "strategy", f"{option_of('parallel', config.parallel)}{over}: {_devices(places)}"
    loader = trainer.splits.loader("train")
    cut = f" in micro-batches of {build.micro_batch_size}" if build.micro_batch_size is not None else ""
    is_endless = len(loader.source) == ENDLESS
    count = "an endless stream of" if is_endless else f"{len(loader.source):,}"
    kind = config.dataset["_target_"].rpartition(".")[2]
    yield "data", f"{kind}: {count} training samples, {config.global_batch_size} a step{cut}"
    epoch, first = loader.order.steps_in(1), trainer.progress.step + 1
    due = {"evaluation": plan.settings.eval_every, "checkpoint": plan.checkpoint_every}
    every = [f"{what} {'at the end' if steps is None else f'every {steps}'}" for what, steps in due.items()]
    steps = f"{first} to {plan.total_steps}" if first <= plan.total_steps else f"all {plan.total_steps} are taken"
    yield "steps", f"{steps}{'' if is_endless else f', {epoch} an epoch'}; {', '.join(every)}"
    low, high, last = trainer.update.lr_span(plan.total_steps)
    yield "lr", f"{low:.2e} to {high:.2e}, {last:.2e} in the last step"


def _devices(places: Sequence[tuple[str, str]]) -> str:
    hosts = list(dict.fromkeys(host for host, _ in places))
    kinds = dict.fromkeys(device for _, device in places)
    counts = [f"{sum(device == kind for _, device in places)} x {kind}" for kind in kinds]
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts, {hosts[0]} to {hosts[-1]}"
    return f"{', '.join(counts)} on {where}"


def _warn_of_low_rate(trainer: Trainer) -> None:
    """Warn if the schedule never brings the learning rate near its peak, or leaves nothing of it for most of the run."""
    total = trainer.plan.total_steps
    _, highest, _ = trainer.update.schedule.span(total)
    if highest < 0.5:
        LOGGER.warning("the learning rate never exceeds %.2g of optimizer.lr in these %d steps: look at scheduler.*",
                       highest, total)  # fmt: skip
    elif trainer.update.schedule.span(max(1, total // 2))[2] < _NOTHING:
        LOGGER.warning("the learning rate is below %g of optimizer.lr from the middle of these %d steps: look at scheduler.*",
                       _NOTHING, total)  # fmt: skip


_NOTHING = 1e-4  # of the peak learning rate
