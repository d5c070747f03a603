"""From a command line to a run: compose, check, claim the directory, freeze, and start the workers."""

import sys
from typing import TYPE_CHECKING

from framework.cli.callbacks import callbacks
from framework.cli.check_run import print_summary, shows_model
from framework.cli.existing_run import of_existing_run
from framework.cli.overview import over_root
from framework.config.code import loading
from framework.config.compose import Composed, compose_line
from framework.config.draft import Draft
from framework.config.modes import MODES, Command, folder_of
from framework.config.schema import RunConfig
from framework.config.targets import locate
from framework.launch.claim import ClaimedRun, claim, is_finished, is_over
from framework.launch.decision import print_problems
from framework.launch.mirrored import put_missing
from framework.launch.other import other_launcher
from framework.launch.slurm import submit
from framework.launch.torchrun import join
from framework.preflight.check import check, code_problems, edited_problems
from framework.preflight.slurm import job_problems
from framework.runs.mirror import with_fetched_resume
from framework.runtime import log, slurm
from framework.runtime.environment import FOREIGN_LAUNCHER, Environment, SrunTask, variables
from framework.runtime.exits import Exit, Interrupted, Unfit, exits_as_errors
from framework.runtime.files import open_files
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem
from framework.runtime.program import keep_cuda_for_children
from framework.runtime.slurm import SlurmFailed

if TYPE_CHECKING:
    from framework.build.training import Builder


@loading()
def start(overrides: list[str], *, checked: Draft | None = None, is_rehearsed: bool = False) -> int:
    """Run one command line to its end. Return the exit code. A sweep gives its configuration, which is `checked`."""
    try:
        with exits_as_errors():
            return _start(overrides, checked, is_rehearsed)
    except (Interrupted, Unfit) as end:
        LOGGER.error("%s", end)
        return end.code


def _start(overrides: list[str], checked: Draft | None, is_rehearsed: bool) -> int:
    open_files()  # as many as the process may have
    keep_cuda_for_children()
    try:
        is_step = _enter_step(overrides)
    except SlurmFailed as error:
        LOGGER.error("srun has started several processes, and Slurm does not say where the first process is: %s", error)
        return Exit.PREEMPTED
    launcher = other_launcher()
    if launcher is not None:
        problems = [Problem.of_line(line) for line in launcher.join()]
        if problems:  # the ranks cannot agree which of them prints; if rank 0 has not, the problem exists on this node only
            return print_problems(problems, each_rank=True)
        variables()[FOREIGN_LAUNCHER] = type(launcher).__name__
    environment = Environment.read()
    log.start_console(rank=environment.rank)
    PREEMPTION.speaks &= environment.rank == 0  # a sweep prints for its jobs
    PREEMPTION.watch()
    with callbacks(overrides, around="run" if checked is None else "job", rank=environment.rank) as ended:
        if environment.is_launched:
            line = overrides if is_step else None
            code = join(lambda: begin(overrides, world_size=environment.world_size), environment=environment, line=line)
        else:
            if checked is None:
                admitted = admit(overrides, world_size=None)
            else:
                if checked.config is not None:  # it was checked earlier than now: the user may have edited files since
                    checked.add(edited_problems(checked.config.targets()))
                admitted = _admit(checked, is_job=True, is_rehearsed=is_rehearsed)
            code = admitted if isinstance(admitted, int) else _run(Command(overrides, admitted))
        ended.return_value = code
    if launcher is not None and code != Exit.FAILED:  # a rank that fails must not wait for the others
        launcher.leave()
    return code


def _run(command: Command) -> int:
    return locate(MODES[command.config.mode].parent)(command)  # type: ignore[no-any-return]


def _enter_step(overrides: list[str]) -> bool:
    """Use the tasks of an `srun` as the processes of one run, like torchrun's. With `launch.nnodes`, each task is a node.

    Return whether this process is one of several tasks, and not a node.
    """
    task = SrunTask.read()
    if task is None or any(text.startswith("launch.nnodes=") for text in overrides):
        return False
    task.export(slurm.address_of_first(task.nodes))
    return True


def launch(command: Command) -> int:
    """Start the workers of a run: as a job, as one of several nodes, or on this machine. Return the exit code."""
    config = command.config
    if config.launch.kind == "slurm":
        return submit([config], folder=folder_of(config.run, config.mode) / "slurm")[0]
    if config.launch.node_counts != range(1, 2):
        from framework.launch.elastic.agent import take_part

        return take_part(config)
    run = claim(config, line=command.line)
    if isinstance(run, Exit):
        return run
    from framework.launch.worker import start_workers

    try:
        with run.mirrored() as settle:
            return settle(start_workers(run))
    finally:
        run.lock.release()


def begin(overrides: list[str], *, world_size: int) -> ClaimedRun | int:
    """Compose and check, claim the run's directory, and freeze. Of the processes of a launcher, one calls this.

    Return an exit code if the configuration is wrong, the directory is in use, or the run has finished already.
    """
    config = admit(overrides, world_size=world_size)
    if isinstance(config, int):
        return config
    return claim(config, line=overrides) if MODES[config.mode].worker else _run(Command(overrides, config))


def admit(overrides: list[str], *, world_size: int | None) -> RunConfig | int:
    """Compose and check, without writing anything. Return an exit code if nothing can be started."""
    composed = compose_line(overrides)
    if composed.mode is not None and composed.mode.about == "root":
        return over_root(overrides, composed, composed.mode)
    return _admit(_checked(composed, world_size=world_size))


def _admit(draft: Draft, *, is_job: bool = False, is_rehearsed: bool = False) -> RunConfig | int:
    """Return a checked configuration that can start. A sweep does not read the data of each of its finished jobs (`is_job`)."""
    config = draft.config
    if config is not None and not MODES[config.mode].worker:
        return config
    if config is not None and MODES[config.mode].about == "run":
        if problems := code_problems(config.run, config.targets()):
            return print_problems(problems)
        if is_over(config.run) and not is_job:
            from framework.modes.data_record import require_recorded

            draft.call(require_recorded)
        if is_finished(config.run, targets=config.targets()):
            return put_missing(config.run, name=config.name)
        if problems := draft.change("run", with_fetched_resume):
            return print_problems(problems)
    draft.check(job_problems)
    if (config := draft.config) is None:
        return print_problems(draft.problems)
    from framework.preflight.dry_build import build_problems

    build, is_shown = builder_of(draft), shows_model(config.mode)
    problems = build_problems(build, is_shown=is_shown)
    if problems := problems or ([] if is_rehearsed else rehearsal_problems(build)):
        return print_problems(problems)
    if is_shown:
        print_summary(build.summary, file=sys.stderr, is_short=True)
    return config


def builder_of(draft: Draft) -> "Builder":
    """Return the builder of a valid configuration. This imports torch, which a finished job of a sweep does not need."""
    from framework.build.training import Builder
    from framework.distributed.world import World

    assert draft.config is not None
    return Builder(draft.config, world=World.alone())


def rehearsal_problems(build: "Builder") -> list[Problem]:
    """Rehearse a run without other problems, if it asks for it."""
    from framework.preflight.rehearsal import rehearse

    is_due = build.config.rehearse and MODES[build.config.mode].about == "run" and not Environment.read().is_foreign
    return rehearse(build) if is_due else []


def checked_line(overrides: list[str], *, world_size: int | None = None) -> Draft:
    """Compose a command line. Return its complete configuration, or all its problems."""
    return _checked(compose_line(overrides), world_size=world_size)


def _checked(composed: Composed, *, world_size: int | None) -> Draft:
    if not composed.problems and composed.mode is not None and composed.mode.about == "existing run":
        composed = of_existing_run(composed, composed.mode)
        if composed.problems:
            return Draft({}, composed.problems)
    return check(composed, world_size=world_size)
