"""Claiming a run's directory for this launch, and reporting that a run is finished."""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from framework.config.frozen_file import FrozenConfig, freeze
from framework.config.modes import MODES, folder_of
from framework.config.schema import RunConfig, RunSection
from framework.launch.scratch import remove_scratch
from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import MACHINE, read_rows
from framework.runs.provenance import Provenance
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit, RunEnded
from framework.runtime.files import require_room
from framework.runtime.lock import Lock
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem


@dataclass(frozen=True)
class ClaimedRun:
    """A run that can start: this launch has its lock, and its configuration is frozen."""

    config: RunConfig
    frozen: FrozenConfig
    lock: Lock


def is_finished(run: RunSection) -> bool:
    """Return whether there is nothing left to do, and print the result if so."""
    directory = RunDirectory(Path(run.dir))
    if not directory.is_finished or run.resume == "never":
        return False
    summary = directory.read_summary()
    rows = read_rows(directory.metrics) if directory.metrics.exists() else []
    if all(row["step"] != summary.get("step") for row in rows):
        LOGGER.warning("%s has lost its last rows", directory.metrics)
    LOGGER.info("finished already, at step %s: %s", summary.get("step"), directory.path)
    for split, metrics in summary.get("metrics", {}).items():
        shown = {name: value for name, value in metrics["last"].items() if name not in ("lr", "grad_norm", *MACHINE)}
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in shown.items() if isinstance(value, float))
        LOGGER.info("%s", f"  {split:5}  {numbers}")
    if run.resume not in ("auto", "must"):
        LOGGER.info("run.resume=%s is not used", run.resume)
    return True


def accept_code(run: RunSection, targets: list[str]) -> None:
    """Record, with `run.code=accept`, what has changed in the code since a finished run began: it is not asked for again."""
    if run.code == "accept":
        provenance = Provenance(Path(run.dir))
        if provenance.changes(targets):
            provenance.add_start(targets)


def claim(config: RunConfig, *, party: str | None = None) -> ClaimedRun | Exit:
    """Take the run's directory and freeze the configuration there. An exit code if another party has it (see Lock)."""
    directory = RunDirectory(Path(config.run.dir))
    # evaluation and export of a run have a lock and a log of their own: the run itself may be in progress
    is_beside = MODES[config.mode].about == "existing run"
    folder = folder_of(config.run, config.mode)
    if is_beside:
        PREEMPTION.says = "stopping"  # there are no steps
    lock = Lock(folder, party=party)
    try:
        require_room(folder)
        lock.take()
        remove_scratch(folder)
        if config.run.resume == "never" and (directory.path / "config.yaml").exists():
            LOGGER.info("the earlier run is now in %s", directory.move_aside())
        frozen = freeze(config.plain(), folder, name="frozen.yaml" if is_beside else "config.yaml")
        if not is_beside:
            Provenance(directory.path).add_start(config.targets())
        return ClaimedRun(config, replace(frozen, token=lock.token), lock)
    except RunEnded as end:
        LOGGER.error("%s", end)
        return end.code
    except OSError as error:
        LOGGER.error("the run's directory cannot be written: %s", error)
        return Exit.DISK


def as_text(decision: FrozenConfig | int) -> str:
    """Return rank 0's decision as text for the other ranks: `DIGEST TOKEN PATH`, or an exit code."""
    if isinstance(decision, FrozenConfig):
        return f"{decision.digest} {decision.token} {decision.path.absolute()}"
    return str(int(decision))


def from_text(text: str) -> FrozenConfig | int:
    """Return the decision that rank 0 has sent as text."""
    first, *rest = text.split(" ", 2)
    return FrozenConfig(Path(rest[1]), digest=first, token=rest[0]) if rest else int(first)


def print_problems(problems: list[Problem], *, each_rank: bool = False) -> Exit:
    """Print the problems, a line each. Under a launcher rank 0 prints, then `each_rank` if asked. Returns the exit code."""
    code = next((problem.code for problem in problems if problem.code == Exit.CONFIGURATION), problems[0].code)
    if Environment.read().rank != 0:
        time.sleep(5)  # a launcher ends all ranks when one ends: not before rank 0 has printed
        if not each_rank:
            return code
    for problem in problems:
        print(problem, file=sys.stderr)
    return code
