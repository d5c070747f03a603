"""From a command line to a run: compose, check, claim the directory, freeze, and hand over to the workers."""

from pathlib import Path

from framework.cli.existing_run import of_existing_run
from framework.config.components import locate
from framework.config.compose import Composed, compose
from framework.config.modes import MODES, Command
from framework.config.schema import RunConfig
from framework.launch.claim import ClaimedRun, claim, is_finished, print_problems
from framework.preflight.check import Checked, check
from framework.preflight.slurm import job_problems
from framework.runtime import log
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit
from framework.runtime.preemption import PREEMPTION


def start(overrides: list[str]) -> int:
    """Run one command line to its end. Returns the exit code."""
    environment = Environment.read()
    log.start_console(rank=environment.rank)
    PREEMPTION.speaks &= environment.rank == 0  # a sweep prints for its jobs
    PREEMPTION.watch()
    if environment.is_launched:
        from framework.launch.torchrun import join

        return join(lambda: begin(overrides, world_size=environment.world_size), environment=environment)
    config = admit(overrides, world_size=None)
    return config if isinstance(config, int) else locate(MODES[config.mode].parent)(Command(overrides, config))


def launch(command: Command) -> int:
    """Start the workers of a run: as a job, as one node of several, or here. Returns the exit code."""
    config = command.config
    if config.launch.kind == "slurm":
        from framework.launch.slurm import submit

        return submit([config], folder=Path(config.run.dir) / "slurm")[0]
    if config.launch.node_counts != range(1, 2):
        from framework.launch.elastic.agent import take_part

        return take_part(config)
    run = claim(config)
    if isinstance(run, Exit):
        return run
    from framework.launch.worker import start_workers

    try:
        return start_workers(run)
    finally:
        run.lock.release()


def begin(overrides: list[str], *, world_size: int) -> ClaimedRun | int:
    """Compose and check; claim the run's directory and freeze. Of the processes that a launcher started, one calls this.

    An exit code instead, if the configuration is wrong, the directory in use, or the run finished already.
    """
    config = admit(overrides, world_size=world_size)
    if isinstance(config, int):
        return config
    return claim(config) if MODES[config.mode].worker else locate(MODES[config.mode].parent)(Command(overrides, config))


def admit(overrides: list[str], *, world_size: int | None) -> RunConfig | int:
    """Compose and check, without writing anything. An exit code instead, if there is nothing to start."""
    composed = compose(overrides)
    mode = MODES.get(str(composed.config.get("mode")))
    if mode is not None and mode.about == "root":
        from framework.cli.overview import over_root

        return over_root(composed, mode)
    checked = _checked(composed, world_size=world_size)
    config, problems = checked.config, checked.problems
    if config is not None and mode is not None:
        if not mode.worker:
            return config
        if mode.about == "run" and is_finished(config.run):
            return Exit.FINISHED
        from framework.preflight.dry_build import dry_build

        problems = dry_build(config)
    sections = {problem.key.partition(".")[0] for problem in checked.problems}
    if {"run", "launch", "name"} <= checked.valid.keys() and not sections & {"run", "launch"}:
        run, name = checked.valid["run"], checked.valid["name"]
        problems = problems + job_problems(run, checked.valid["launch"], job_name=f"{name}/{run.id}")
    return print_problems(problems) if problems or config is None else config


def checked_line(overrides: list[str], *, world_size: int | None = None) -> Checked:
    """Compose a command line; return its complete configuration, or every problem that it has."""
    return _checked(compose(overrides), world_size=world_size)


def _checked(composed: Composed, *, world_size: int | None) -> Checked:
    mode = MODES.get(str(composed.config.get("mode")))
    if not composed.problems and mode is not None and mode.about == "existing run":
        composed = of_existing_run(composed, mode)
        if composed.problems:
            return Checked(None, composed.problems, {})
    return check(composed, world_size=world_size)
