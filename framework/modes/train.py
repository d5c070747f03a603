"""One run in one worker: build, continue from the newest checkpoint, train, write the results."""

import json
import math
import os
import socket
import time
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from framework.build.training import Builder
from framework.checkpoint.canonical import gathered, misfit, restore, state_of
from framework.checkpoint.format import write_safetensors
from framework.checkpoint.manifest import candidates, checkpoints_of, step_of
from framework.checkpoint.plain_state import extra_state
from framework.checkpoint.state import stored_plain_state
from framework.checkpoint.store import CheckpointStore
from framework.checkpoint.weights import EXTRA_STATE
from framework.config.code import loaded_unseen
from framework.modes.data_record import DataRecord
from framework.modes.opening import open_record
from framework.modules.flops import device_name
from framework.runs.curves import draw_curves
from framework.runs.directory import RunDirectory
from framework.runs.facts import result, say
from framework.runs.metrics_file import iterate_rows, numbers_of, write_rows
from framework.runs.provenance import CHANGED, WAYS, Provenance
from framework.runtime.exits import DiskFailed, Exit, NoValidCheckpoint, RunEnded, Unfit, exits_as_errors, headline
from framework.runtime.files import flush_to_disk, replacing
from framework.runtime.log import LOGGER
from framework.runtime.plain import Invalid, require_file
from framework.runtime.preemption import PREEMPTION
from framework.training.loop import Trainer


def train(build: Builder) -> Exit:
    """Train the run. Collective. Return how it ended; raise an unexpected error."""
    directory, world = build.directory, build.world
    places = world.agreement.to_rank_0((socket.gethostname(), device_name(world.device)))
    if places:
        Provenance(directory.path).add_workers(hosts=[host for host, _ in places], devices=[device for _, device in places])
    trainer = build.trainer()
    trainer.update.require_steps(trainer.plan.total_steps)
    try:
        with world.groups.ending_together(), exits_as_errors():
            began = _continue(trainer, build)
            open_record(trainer, build, places=places, **began)
            is_finished = trainer.fit()
            if is_finished:
                if trainer.parts.loop.stopped and world.rank == 0:
                    LOGGER.info("ended after step %d: %s", trainer.progress.step, trainer.parts.loop.stopped)
                trainer.parts.ended()
                _leave_results(trainer, build)
        if not is_finished and world.rank == 0:
            assert trainer.saver.last is not None  # a stop saves a checkpoint, or relies on the last one
            LOGGER.info("stopped after step %d; the same command continues from the checkpoint of step %d",
                        trainer.progress.step, trainer.saver.last.step)  # fmt: skip
        _close_record(trainer, "finished" if is_finished else "preempted")
        if is_finished and world.rank == 0:  # last, so that no part of a terminal's live line is below it
            written = [path.name for path in (directory.weights, directory.metrics, directory.curves) if path.exists()]
            LOGGER.info("finished: %s and %s are in %s", ", ".join(written[:-1]), written[-1], directory.path)
            say(result(directory, root=build.config.run.root))
        return Exit.FINISHED if is_finished else Exit.PREEMPTED
    except RunEnded as end:
        what = f"{end}; {_what_is_left(directory)}" if isinstance(end, DiskFailed) else str(end)
        if world.rank == 0:
            LOGGER.error("%s", what)
        if trainer.recorder.is_open or not directory.read_summary().get("step"):
            _close_record(trainer, "failed", error=what)
        else:  # refused before it continued: the record of what it has computed stays
            values: dict[str, Any] = {} if end.code == Exit.CONFIGURATION else {"status": "failed", "error": what}
            trainer.recorder.close(**values)
        return end.code
    except Exception as error:
        world.report_error(error)
        # without the counters, which may be collective; but the sinks (and a terminal's cursor) must be closed
        trainer.recorder.close(status="failed", error=headline(error))
        raise
    finally:
        trainer.saver.close()
        if trainer.speed.profile is not None:
            trainer.speed.profile.close()
        trainer.splits.close()


def _what_is_left(directory: RunDirectory) -> str:
    kept = candidates(directory.checkpoints)
    return f"the last valid checkpoint is intact ({kept[0].name})" if kept else "no checkpoint has been written"


def _continue(trainer: Trainer, build: Builder) -> dict[str, Any]:
    """Load this run's newest checkpoint that is valid and fits; without one, load what `run.resume` names. Collective.

    Return what the record must know of the run's beginning, if this is it.
    """
    directory, world = build.directory, build.world
    data = DataRecord(build.config.run, Provenance(directory.path), world, build.config.seed, trainer.splits)
    found = trainer.saver.store.newest_valid(unfit=partial(_unfit, trainer, run_id=build.config.run.id))
    resume = build.config.run.resume
    elsewhere = None if resume in ("auto", "never", "must") else Path(resume)
    began = {"began_from": None} if found is None else {}
    if found is None and elsewhere is not None:
        found = _from_elsewhere(elsewhere, build)
        left = found[1].get("evaluations_left", [])
        found[1]["evaluations_left"] = [split for split in trainer.splits.validations() if split in left]
        began = {"began_from": found[1]["began_from"]}
        if fault := _unfit(trainer, *found):
            raise NoValidCheckpoint(f"{found[0]} {fault}; model.init_from=FILE loads only the weights")
    if found is None:
        return began
    _require_known_code(build)
    path, state = found
    data.expect(state["data"])
    restore(path, stored_plain_state(state), trainer.held, world=world)
    trainer.load_state_dict(state)
    if path.parent != directory.checkpoints:
        if trainer.is_over:
            raise NoValidCheckpoint(f"{path} leaves nothing to train: it has taken {trainer.progress.step} steps, and this run "
                                    f"ends after {trainer.plan.total_steps}, or when early stopping ends it")  # fmt: skip
        theirs = RunDirectory(path.parent.parent).metrics

        def take_over_rows() -> None:
            if theirs.exists():
                write_rows(directory.metrics, (row for row in iterate_rows(theirs) if row["split"] != "test"))

        world.agreement.on_rank_0(take_over_rows, what=f"the rows of {path} not copied")
    if world.rank == 0:
        LOGGER.info("continuing from %s", path)
    return began


def _unfit(trainer: Trainer, path: Path, state: dict[str, Any], *, run_id: str | None = None) -> str | None:
    """Return why a checkpoint cannot be loaded into this run. NoValidCheckpoint if not of this `run_id`. Collective."""
    writer = str(state.get("record_id") or run_id).partition("-")[0]
    if run_id is not None and writer != run_id:
        what = f"{path} was written by another run ({writer}, this is {run_id})"
        raise NoValidCheckpoint(f"{what}; run.resume={path} starts from it, in a directory without checkpoints")
    there, here = state["facts"], trainer.saver.facts
    differing = [f"{name} is {there.get(name)} there and {here.get(name)} here" for name in here | there
                 if there.get(name) != here.get(name)]  # fmt: skip
    fault = "; ".join(differing) or misfit(path, trainer.held, world=trainer.world)
    return fault and f"does not fit this run: {fault}"


def _require_known_code(build: Builder) -> None:
    """End a run that continues with new or other modules and files that no import reaches, unless the user accepts them.

    Examples: plug-ins in a folder, a file that a constructor reads. The imports of a component were compared before the start.
    """
    lines, run = list[str](), build.config.run
    if build.world.rank == 0 and (loaded := loaded_unseen()):
        provenance = Provenance(build.directory.path)
        lines = provenance.changes_loaded(loaded, with_new=True)
        if lines and run.code == "accept":
            provenance.add_loaded(loaded, accepted=lines)
            lines = []
    if lines := build.world.agreement.from_rank_0(lines):
        raise Unfit(f"run.code: {CHANGED.format(run.dir)}: {'; '.join(lines)} ({WAYS})")


def _from_elsewhere(path: Path, build: Builder) -> tuple[Path, dict[str, Any]]:
    """Return the valid checkpoint of `path` (a run or a checkpoint), changed for a start of this run from it. Collective."""
    world = build.world
    store = CheckpointStore(checkpoints_of(path), world=world, keep_last=1, keep_best=0, mode="min")
    found = store.named(path) if step_of(path) is not None else store.newest_valid()
    if found is None:
        raise NoValidCheckpoint(f"{path} has no checkpoint")
    rows = RunDirectory(store.directory.parent).metrics
    fault = None
    try:
        with suppress(FileNotFoundError):
            require_file(rows)
    except (Invalid, OSError) as error:
        fault = str(error)
    if fault := world.agreement.from_rank_0(fault):
        raise NoValidCheckpoint(f"{path}: {fault}")
    # the other run tracked by its own settings, and its clock and its end do not count here
    step = found[1]["progress"]["step"]
    tracker = build.tracker()
    for row in map(numbers_of, iterate_rows(rows, until=step)) if world.rank == 0 else ():
        for part in (tracker, tracker.patience) if row["split"] != "test" else ():
            with suppress(Unfit, TypeError):  # not measured there, or null
                part.note(row)
    metrics, patience = world.agreement.from_rank_0((tracker.splits, tracker.patience.state_dict()))
    began = {"wall_s": 0.0, "train_s": 0.0, "began": time.time()}
    origin = {"path": os.path.realpath(path), "record_id": found[1].get("record_id"), "step": step}
    progress = found[1]["progress"] | began
    found[1].update(metrics=metrics, patience=patience, record_id=None, progress=progress, began_from=origin)
    return found


def _leave_results(trainer: Trainer, build: Builder) -> None:
    """Write the weights and the curves. Collective, because the weights are gathered."""
    run, saving, directory = build.config.run, build.config.checkpoint, build.directory
    world, module = trainer.world, trainer.engine.module
    world.at("the results", step=trainer.progress.step)
    parts = list(world.agreement.distinct(extra_state(module)).values())
    extra = {name: value for part in parts[::-1] for name, value in part.items()}
    metadata = {"format": "pt"} | ({EXTRA_STATE: json.dumps(extra)} if extra else {})
    with trainer.update.averaged():  # the evaluated weights are the final weights
        kinds, tensors = gathered(state_of(module), world=world)

        def write() -> None:
            """Write the weights on rank 0 as they arrive. Collective."""
            try:
                if world.rank == 0:
                    with replacing(directory.weights) as beside:
                        beside.unlink()  # write_safetensors creates its file
                        write_safetensors(beside, kinds, tensors, metadata=metadata)
                    flush_to_disk(directory.path)
            finally:
                deque(tensors, maxlen=0)  # to the end even if nothing can be written, because the other ranks send

        world.agreement.all_or_fail(write, what="the results not written")

    def draw() -> None:
        restarts, title = directory.read_summary().get("continued_at", []), f"{build.config.name}/{run.id}"
        paths = directory.metrics, directory.curves
        draw_curves(*paths, title=title, restarts=restarts, monitor=saving.monitor, mode=saving.direction)

    world.agreement.on_rank_0(draw, what="the results not written")


def _close_record(trainer: Trainer, status: str, **values: Any) -> None:
    trainer.speed.tick(trainer.progress)
    grace_s = trainer.plan.grace_s
    within_s = PREEMPTION.left_of(grace_s) if grace_s is not None else math.inf
    trainer.recorder.close(within_s=within_s, status=status, **trainer.summary(), **values)
