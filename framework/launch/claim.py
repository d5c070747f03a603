"""The claim of a run's directory for this launch, and the report that a run is finished."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from framework.config.frozen_file import FrozenConfig, freeze
from framework.config.modes import MODES, folder_of
from framework.config.schema import RunConfig, RunSection
from framework.launch.decision import print_problems
from framework.launch.mirrored import Settle, mirror_of, mirrored, refused
from framework.launch.scratch import remove_scratch
from framework.preflight.check import code_problems
from framework.preflight.origin import resume_problems
from framework.runs.directory import RunDirectory
from framework.runs.facts import result, say
from framework.runs.lineage import parents_of
from framework.runs.metrics_file import iterate_rows
from framework.runs.mirror import Mirror, committed
from framework.runs.provenance import Provenance
from framework.runtime.exits import Exit, RunEnded
from framework.runtime.files import require_room
from framework.runtime.lock import Lock
from framework.runtime.log import LOGGER
from framework.runtime.objects import StoreFailed
from framework.runtime.preemption import PREEMPTION


@dataclass(frozen=True)
class ClaimedRun:
    """A run that can start: this launch holds its lock, and its configuration is frozen."""

    config: RunConfig
    frozen: FrozenConfig
    lock: Lock
    mirror: Mirror | None = None

    def mirrored(self) -> AbstractContextManager[Settle]:
        """Keep the run's mirror up to date, if it has one. Yield a function from the work's exit code to the command's."""
        if self.mirror is None:
            return nullcontext(lambda code: code)
        return mirrored(self.mirror, grace_s=self.config.launch.grace_s)


def is_over(run: RunSection) -> bool:
    """Return whether nothing is left to do."""
    return RunDirectory(Path(run.dir)).is_finished and run.resume != "never"


def is_finished(run: RunSection, *, targets: list[str]) -> bool:
    """Return whether nothing is left to do. If so, print the result, and accept the code."""
    if not is_over(run):
        return False
    directory = RunDirectory(Path(run.dir))
    summary = directory.read_summary()
    if all(row["step"] != summary.get("step") for row in iterate_rows(directory.metrics)):
        LOGGER.warning("%s has lost its last rows", directory.metrics)
    LOGGER.info("finished already, at step %s: %s", summary.get("step"), directory.path)
    say(result(directory, root=run.root))
    accept_code(run, targets=targets)
    return True


def accept_code(run: RunSection, *, targets: list[str]) -> None:
    """Record, with `run.code=accept`, the code's changes since a finished run started. Then nobody must accept them again."""
    provenance = Provenance(Path(run.dir))
    if run.code == "accept" and provenance.changes(targets):
        provenance.add_start(targets)


def claim(config: RunConfig, *, party: str | None = None, line: Sequence[str] = ()) -> ClaimedRun | Exit:
    """Take the run's directory and its mirror, update the directory from the mirror, and freeze the configuration.

    `line`: the overrides of the run's own command, for its record. Return an exit code if another party holds the run (see
    Lock), or if nothing is left to do.
    """
    directory = RunDirectory(Path(config.run.dir))
    # evaluation and export of a run have their own lock and log: the run itself may be active
    is_beside = MODES[config.mode].about != "run"
    folder = folder_of(config.run, config.mode)
    if is_beside:
        PREEMPTION.says = "stopping"  # these modes have no steps
    lock, is_claimed = Lock(folder, party=party), False
    try:
        mirror = None if is_beside else mirror_of(config.run, name=config.name)
        # this finds a wrong place before anything is written
        has_none = mirror is not None and not committed(mirror.objects.listing())
        if has_none and config.run.resume == "must" and (problems := resume_problems("must", directory)):
            return print_problems(problems)
        require_room(folder)
        lock.take()
        remove_scratch(folder)
        if config.draft:
            LOGGER.info("a draft, which the next one replaces: not rehearsed, code and data not checked (steadfast promote)")
            directory.replace_draft()
        if config.run.resume == "never" and (directory.path / "config.yaml").exists():
            LOGGER.info("the earlier run is now in %s", directory.move_aside())
        is_submission = config.launch.kind == "slurm" and party is None
        if mirror is not None and config.run.resume == "never":
            mirror.move_aside()
        held = None if mirror is None or is_submission else _hold(mirror, config.run, targets=config.targets())
        if isinstance(held, Exit):
            return held
        frozen = freeze(config.plain(), folder, name="frozen.yaml" if is_beside else "config.yaml")
        if not is_beside:
            taken = parents_of(config.plain(), folder=Path.cwd(), run=directory.path)
            Provenance(directory.path).add_start(config.targets(), line=line, taken=taken)
        is_claimed = True
        return ClaimedRun(config, replace(frozen, token=lock.token), lock, held)
    except RunEnded as end:
        LOGGER.error("%s", end)
        return end.code
    except StoreFailed as failure:
        return print_problems([refused(failure)])
    except OSError as error:
        LOGGER.error("the run's directory cannot be written: %s", error)
        return Exit.DISK
    finally:
        if not is_claimed:
            lock.release()


def _hold(mirror: Mirror, run: RunSection, *, targets: list[str]) -> Mirror | Exit:
    """Take the mirror, and fetch what it has ahead of the directory. Return an exit code if nothing is left to do."""
    mirror.take()
    if mirror.bring_back():
        if problems := code_problems(run, targets) + resume_problems(run.resume, RunDirectory(Path(run.dir))):
            return print_problems(problems)
        if is_finished(run, targets=targets):
            return Exit.FINISHED
    return mirror
