"""From a command line to a run: compose, check, claim the directory, freeze, and hand over to the workers."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework import log, preflight, slurm_preflight
from framework.config import compose
from framework.environment import Environment
from framework.files import require_room
from framework.frozen import Frozen, freeze
from framework.launch.scratch import sweep
from framework.log import LOGGER
from framework.metrics import MACHINE, read_rows
from framework.outcome import Exit
from framework.preemption import PREEMPTION
from framework.problems import Problem
from framework.revisit import MODES, revisit
from framework.run_directory import Busy, Lock, RunDirectory
from framework.sweep_table import TableRow, listing
from framework.tryout import try_out


def start(overrides: list[str]) -> int:
    """Run one command line to its end. Returns the exit code."""
    environment = Environment.read()
    log.start_console(rank=environment.rank)
    PREEMPTION.speaks &= environment.rank == 0  # a sweep speaks for its jobs
    PREEMPTION.watch()
    if environment.is_launched:
        from framework.launch.torchrun import join

        return join(overrides, environment=environment)
    config = admit(overrides, world_size=None)
    if isinstance(config, Exit):
        return config
    if config["launch"]["kind"] == "slurm":
        from framework.launch.slurm import submit

        return submit([config], folder=Path(config["run"]["dir"]) / "slurm")[0]
    if config["launch"]["nnodes"] not in (1, "1"):
        from framework.launch.elastic import take_part

        return take_part(config)
    begun = claim(config)
    if isinstance(begun, Exit):
        return begun
    from framework.launch.local import launch

    try:
        return launch(begun.config, frozen=begun.frozen)
    finally:
        begun.lock.release()


@dataclass(frozen=True)
class Begun:
    """A run that may go: its directory is ours, its configuration frozen."""

    config: dict[str, Any]
    frozen: Frozen
    lock: Lock


def begin(overrides: list[str], *, world_size: int) -> Begun | Exit:
    """Compose and check; claim the run's directory and freeze. One process of those that a launcher started does this.

    An exit code instead, if the configuration is wrong, the directory in use, or the run finished already.
    """
    config = admit(overrides, world_size=world_size)
    return config if isinstance(config, Exit) else claim(config)


def admit(overrides: list[str], *, world_size: int | None) -> dict[str, Any] | Exit:
    """Compose and check, leaving no trace. An exit code instead, if the configuration is wrong or the run finished already."""
    config, problems = compose(overrides)
    if config.get("mode") in ("report", "status"):
        from framework.launch.over_root import over_root

        return over_root(config, overrides, problems)
    config, problems = _complete(config, problems, overrides=overrides, world_size=world_size)
    if not problems and config["mode"] == "plan":
        print(listing([TableRow.read(config, dict(override.split("=", 1) for override in overrides))]), end="")  # type: ignore[misc]
        return Exit.FINISHED
    if not problems and config["mode"] not in MODES and is_finished(config):
        return Exit.FINISHED
    problems = (problems or try_out(config)) + slurm_preflight.problems(config, but=problems)
    return report(problems) if problems else config


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


def check(overrides: list[str], *, world_size: int | None) -> tuple[dict[str, Any], list[Problem]]:
    """Compose a command line and return the complete configuration, with every problem that it has."""
    config, problems = compose(overrides)
    return _complete(config, problems, overrides=overrides, world_size=world_size)


def _complete(
    config: dict[str, Any], problems: list[Problem], *, overrides: list[str], world_size: int | None
) -> tuple[dict[str, Any], list[Problem]]:
    if not problems and config["mode"] in MODES:
        config, problems = revisit(config, overrides)
        if problems:
            return config, problems
    return preflight.check(config, problems, world_size=world_size)


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
