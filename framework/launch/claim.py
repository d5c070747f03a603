"""Claiming a run's directory for this launch, and saying so where there is nothing left to do."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.frozen_file import Frozen, freeze
from framework.config.modes import MODES
from framework.launch.scratch import sweep
from framework.runs.directory import RunDirectory
from framework.runs.lock import Busy, Lock
from framework.runs.metrics_file import MACHINE, read_rows
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit
from framework.runtime.files import require_room
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem


@dataclass(frozen=True)
class Begun:
    """A run that may go: its directory is ours, its configuration frozen."""

    config: dict[str, Any]
    frozen: Frozen
    lock: Lock


def is_finished(config: dict[str, Any]) -> bool:
    """Return whether there is nothing left to do, and tell the result if so."""
    directory = RunDirectory(Path(config["run"]["dir"]))
    if not directory.is_finished or config["run"]["resume"] == "never":
        return False
    _tell_result(directory)
    if config["run"]["resume"] not in ("auto", "must"):
        LOGGER.info("run.resume=%s is not used", config["run"]["resume"])
    return True


def claim(config: dict[str, Any], *, party: str | None = None) -> Begun | Exit:
    """Take the run's directory and freeze the configuration there. An exit code if others than our `party` have it (see Lock)."""
    directory = RunDirectory(Path(config["run"]["dir"]))
    # what evaluates or exports a run has a lock and a log of its own: the run may be going on
    is_beside = config["mode"] in MODES
    folder = directory.path / f".{config['mode']}" if is_beside else directory.path
    if is_beside:
        PREEMPTION.says = "stopping"  # there are no steps
    lock = Lock(folder, party=party)
    try:
        require_room(folder)
        lock.take()
        sweep(folder)
        if config["run"]["resume"] == "never" and (directory.path / "config.yaml").exists():
            LOGGER.info("the earlier run is now in %s", directory.move_aside())
            lock.release()
            lock.take()
        return Begun(config, freeze(config, folder, name="frozen.yaml" if is_beside else "config.yaml"), lock)
    except Busy as busy:
        LOGGER.error("%s", busy)
        return busy.code
    except OSError as error:
        LOGGER.error("the run's directory cannot be written: %s", error)
        return Exit.DISK


def report(problems: list[Problem]) -> Exit:
    """Print the problems, a line each. Under a launcher one of its processes speaks. Returns the exit code."""
    code = next((problem.code for problem in problems if problem.code == Exit.CONFIGURATION), problems[0].code)
    if Environment.read().rank != 0:
        time.sleep(5)  # a launcher ends all when one ends: not before rank 0 has spoken
        return code
    for problem in problems:
        print(problem, file=sys.stderr)
    return code


def _tell_result(directory: RunDirectory) -> None:
    summary = directory.read_summary()
    rows = read_rows(directory.metrics) if directory.metrics.exists() else []
    if all(row["step"] != summary.get("step") for row in rows):
        LOGGER.warning("%s has lost its last rows", directory.metrics)
    LOGGER.info("finished already, at step %s: %s", summary.get("step"), directory.path)
    for split, rows in summary.get("metrics", {}).items():
        row = {name: value for name, value in rows["last"].items() if name not in ("lr", "grad_norm", *MACHINE)}
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in row.items() if isinstance(value, float))
        LOGGER.info("%s", f"  {split:5}  {numbers}")
