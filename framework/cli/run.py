"""From a command line to a run: compose, check, claim the directory, freeze, and hand over to the workers."""

from pathlib import Path
from typing import Any

from framework.cli.existing_run import revisit
from framework.config.compose import compose
from framework.config.modes import MODES
from framework.launch.claim import Begun, claim, is_finished, report
from framework.preflight import check as preflight
from framework.preflight import slurm as slurm_preflight
from framework.preflight.dry_build import try_out
from framework.runs.table import TableRow, listing
from framework.runtime import log
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem


def start(overrides: list[str]) -> int:
    """Run one command line to its end. Returns the exit code."""
    environment = Environment.read()
    log.start_console(rank=environment.rank)
    PREEMPTION.speaks &= environment.rank == 0  # a sweep speaks for its jobs
    PREEMPTION.watch()
    if environment.is_launched:
        from framework.launch.torchrun import join

        return join(lambda: begin(overrides, world_size=environment.world_size), environment=environment)
    config = admit(overrides, world_size=None)
    if isinstance(config, Exit):
        return config
    if config["launch"]["kind"] == "slurm":
        from framework.launch.slurm import submit

        return submit([config], folder=Path(config["run"]["dir"]) / "slurm")[0]
    if config["launch"]["nnodes"] not in (1, "1"):
        from framework.launch.elastic.agent import take_part

        return take_part(config)
    begun = claim(config)
    if isinstance(begun, Exit):
        return begun
    from framework.launch.local import launch

    try:
        return launch(begun.config, frozen=begun.frozen)
    finally:
        begun.lock.release()


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
        from framework.cli.overview import over_root

        return over_root(config, overrides, problems)
    config, problems = _complete(config, problems, overrides=overrides, world_size=world_size)
    if not problems and config["mode"] == "plan":
        print(listing([TableRow.read(config, dict(override.split("=", 1) for override in overrides))]), end="")  # type: ignore[misc]
        return Exit.FINISHED
    if not problems and config["mode"] not in MODES and is_finished(config):
        return Exit.FINISHED
    problems = (problems or try_out(config)) + slurm_preflight.problems(config, but=problems)
    return report(problems) if problems else config


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
