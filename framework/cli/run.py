"""From a command line to a run: compose, check, claim the directory, freeze, and start the workers."""

from functools import partial
from pathlib import Path

from framework.checkpoint.manifest import candidates, step_of
from framework.cli.check_run import show_model
from framework.cli.overview import over_root
from framework.config.code import loading
from framework.config.compose import Composed, compose_line
from framework.config.draft import Draft
from framework.config.frozen_file import recall
from framework.config.identity import is_below
from framework.config.modes import MODES, Command, Mode, folder_of
from framework.config.schema import RunConfig, completed
from framework.config.targets import locate
from framework.config.validation import validate
from framework.launch.claim import ClaimedRun, accept_code, claim, is_finished, print_problems
from framework.launch.mirrored import put_missing
from framework.launch.other import other_launcher
from framework.launch.slurm import submit
from framework.launch.torchrun import join
from framework.preflight.check import check, code_problems
from framework.preflight.slurm import job_problems
from framework.runs.directory import RunDirectory
from framework.runs.fetched_run import with_fetched_resume
from framework.runtime import log, slurm
from framework.runtime.environment import FOREIGN_LAUNCHER, Environment, SrunTask, variables
from framework.runtime.exits import Exit, Interrupted
from framework.runtime.files import open_files
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem, missing_extra
from framework.runtime.program import keep_cuda_for_children
from framework.runtime.slurm import SlurmFailed


@loading()
def start(overrides: list[str]) -> int:
    """Run one command line to its end. Return the exit code."""
    try:
        return _start(overrides)
    except Interrupted as end:
        LOGGER.error("%s", end)
        return end.code


def _start(overrides: list[str]) -> int:
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
    if environment.is_launched:
        line = overrides if is_step else None
        code = join(lambda: begin(overrides, world_size=environment.world_size), environment=environment, line=line)
        if launcher is not None and code != Exit.FAILED:  # a rank that fails must not wait for the others
            launcher.leave()
        return code
    config = admit(overrides, world_size=None)
    return config if isinstance(config, int) else locate(MODES[config.mode].parent)(Command(overrides, config))


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
    return (
        claim(config, line=overrides)
        if MODES[config.mode].worker
        else locate(MODES[config.mode].parent)(Command(overrides, config))
    )


def admit(overrides: list[str], *, world_size: int | None) -> RunConfig | int:
    """Compose and check, without writing anything. Return an exit code if nothing can be started."""
    composed = compose_line(overrides)
    if composed.mode is not None and composed.mode.about == "root":
        return over_root(overrides, composed, composed.mode)
    draft = _checked(composed, world_size=world_size)
    config = draft.config
    if config is not None:
        mode = MODES[config.mode]
        if not mode.worker:
            return config
        if mode.about == "run":
            if problems := code_problems(config.run, config.targets()):
                return print_problems(problems)
            if is_finished(config.run):
                accept_code(config.run, config.targets())
                return put_missing(config.run, name=config.name)
            if problems := draft.change("run", with_fetched_resume):
                return print_problems(problems)
            config = draft.config or config
    draft.check(job_problems)  # before the rehearsal, which takes longer
    if config is not None:
        from framework.preflight.child import problems_in_child
        from framework.preflight.dry_build import dry_build

        may_fork = not Environment.read().is_foreign  # a launcher's library, such as MPI, may not support a fork
        if mode.about != "machines":
            draft.add(problems_in_child(partial(dry_build, config)) if may_fork else dry_build(config))
        if mode.about == "run" and not draft.problems and may_fork:
            from framework.build.training import Builder
            from framework.distributed.world import World
            from framework.preflight.rehearsal import rehearse

            build = Builder(config, world=World.alone())
            draft.add(rehearse(build) if config.rehearse else [])
            if not draft.problems:
                show_model(build)
    return print_problems(draft.problems) if draft.problems or config is None else config


def checked_line(overrides: list[str], *, world_size: int | None = None) -> Draft:
    """Compose a command line. Return its complete configuration, or all its problems."""
    return _checked(compose_line(overrides), world_size=world_size)


def _checked(composed: Composed, *, world_size: int | None) -> Draft:
    if not composed.problems and composed.mode is not None and composed.mode.about == "existing run":
        composed = _of_existing_run(composed, composed.mode)
        if composed.problems:
            return Draft({}, composed.problems)
    return check(composed, world_size=world_size)


# --- mode=eval, predict and export: a run's frozen configuration, with a few keys from the command line


def _of_existing_run(composed: Composed, mode: Mode) -> Composed:
    """Return the configuration for the use of an existing run, or its problems.

    `composed` is the configuration of the command line only. Its `run.dir` names the run.
    """
    draft = validate(composed)
    asked = draft.config
    expected = f"only {', '.join(mode.may_give[1:])}"
    problems = [Problem(key, f"cannot be given to mode={mode.name}: the mode uses the run as it is", expected)
                for key in composed.given if not is_below(key, mode.may_give)]  # fmt: skip
    if "run.dir" not in composed.given:
        problems = [Problem("run.dir", f"is missing: mode={mode.name} needs one run", "run.dir=runs/NAME/ID")]
    if asked is not None and asked.predict.files is not None and "predict.split" in composed.given:
        problems.append(Problem("predict.split", "cannot be given together with predict.files", "one of them"))
    if problems or asked is None:
        known = {problem.key for problem in problems}
        return composed._replace(problems=problems + [problem for problem in draft.problems if problem.key not in known])
    directory = RunDirectory(Path(asked.run.dir))
    try:
        frozen = validate(composed._replace(config=completed(recall(directory.path), asked.plain())))
    except ValueError as error:
        return composed._replace(problems=[_no_run(str(error))])
    run = frozen.config
    problems = frozen.problems + _checkpoint_problems(directory, asked.run.checkpoint)
    problems += missing_extra("export.formats", "export") if "onnx" in (asked.export.formats or []) else []
    if run is None or problems:
        return composed._replace(problems=problems)
    return composed._replace(config=run.evaluated(asked, given=composed.given).plain())


def _no_run(what: str) -> Problem:
    return Problem("run.dir", what, code=Exit.NO_VALID_CHECKPOINT)


def _checkpoint_problems(directory: RunDirectory, which: str | int) -> list[Problem]:
    found = candidates(directory.checkpoints)
    path = directory.checkpoint_path(which)
    if odd := directory.odd_files():
        return [_no_run(f"{directory.path / odd[0]} is not a plain file")]
    if found if path is None else path.exists():
        return []
    steps = ", ".join(str(step_of(path)) for path in reversed(found)) or "none"
    what = f"{which}, but there is no {path or directory.checkpoints / 'step_*'}"
    return [Problem("run.checkpoint", what, f"last, best, final, a path, or a step (the run has: {steps})",
                    code=Exit.NO_VALID_CHECKPOINT)]  # fmt: skip
