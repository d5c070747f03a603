"""From a command line to a run: compose, check, claim the directory, freeze, and hand over to the workers."""

from pathlib import Path
from typing import Any

from framework.build.components import INIT
from framework.checkpoint.manifest import candidates, step_of
from framework.cli.overview import over_root
from framework.config.components import locate
from framework.config.compose import Composed, compose
from framework.config.frozen_file import recall
from framework.config.identity import is_below
from framework.config.modes import MODES, Command, Mode
from framework.config.schema import RunConfig
from framework.launch.claim import ClaimedRun, claim, is_finished, print_problems
from framework.launch.slurm import submit
from framework.launch.torchrun import join
from framework.preflight.check import Checked, check
from framework.preflight.slurm import job_problems
from framework.runs.directory import RunDirectory
from framework.runtime import log
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem, missing_extra, shown


def start(overrides: list[str]) -> int:
    """Run one command line to its end. Returns the exit code."""
    environment = Environment.read()
    log.start_console(rank=environment.rank)
    PREEMPTION.speaks &= environment.rank == 0  # a sweep prints for its jobs
    PREEMPTION.watch()
    if environment.is_launched:
        return join(lambda: begin(overrides, world_size=environment.world_size), environment=environment)
    config = admit(overrides, world_size=None)
    return config if isinstance(config, int) else locate(MODES[config.mode].parent)(Command(overrides, config))


def launch(command: Command) -> int:
    """Start the workers of a run: as a job, as one node of several, or here. Returns the exit code."""
    config = command.config
    if config.launch.kind == "slurm":
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
        composed = _of_existing_run(composed, mode)
        if composed.problems:
            return Checked(None, composed.problems, {})
    return check(composed, world_size=world_size)


# --- mode=eval and mode=export: a run's frozen configuration, with a few keys of the command line


def _of_existing_run(composed: Composed, mode: Mode) -> Composed:
    """Return the configuration by which a run is evaluated or exported, or its problems.

    `composed` is the configuration of the command line alone; its `run.dir` names the run.
    """
    asked, given, name = composed.config, composed.given, composed.config["mode"]
    place = asked["run"]["dir"]
    if "run.dir" not in given or not isinstance(place, str):
        what = "is not given" if "run.dir" not in given else f"{shown(place)} is not valid"
        problem = Problem("run.dir", f"{what}: mode={name} is about one run", "run.dir=runs/NAME/ID")
        return composed._replace(problems=[problem])
    directory = RunDirectory(Path(place))
    expected = f"only {', '.join(mode.may_give[1:])}"
    problems = [Problem(key, f"is not to be given to mode={name}: it takes the run as it is", expected)
                for key in given if not is_below(key, mode.may_give)]  # fmt: skip
    if asked["launch"]["kind"] != "local" or asked["launch"]["nnodes"] not in (1, "1"):
        problems.append(Problem("launch", f"mode={name} is no job, and runs on one node",
                                "launch=local, or torchrun within a job of your own"))  # fmt: skip
    if problems:
        return composed._replace(problems=problems)
    try:
        frozen = recall(directory.path)
    except ValueError as error:
        return composed._replace(problems=[_no_run(str(error))])
    problems = _checkpoint_problems(directory, asked["run"]["checkpoint"])
    formats = asked["export"].get("formats")
    problems += missing_extra("export.formats", "export") if isinstance(formats, list) and "onnx" in formats else []
    return composed._replace(config=_merged(asked, frozen, given=given), problems=problems)


def _no_run(what: str) -> Problem:
    return Problem("run.dir", what, code=Exit.NO_VALID_CHECKPOINT)


def _merged(asked: dict[str, Any], frozen: dict[str, Any], *, given: list[str]) -> dict[str, Any]:
    """Take the run from `frozen`, without the options of training alone, which a strategy might refuse."""
    how = ["mode", "eval", "export", "parallel", "launch", "backend"]
    how += [name for name in ("precision", "micro_batch_size") if any(is_below(key, (name,)) for key in given)]
    workers = {"num_workers": asked["dataset"]["num_workers"]} if "dataset.num_workers" in given else {}
    off = {"compile": False, "activation_checkpointing": False, "sync_batchnorm": False}
    merged = {
        "dataset": frozen["dataset"] | workers,
        "run": asked["run"] | {"id": frozen["run"]["id"]},
        # the file of a warm start is not needed: the weights are a checkpoint's
        "model": {name: value for name, value in frozen["model"].items() if name not in INIT},
        "trainer": asked["trainer"] | frozen["trainer"] | off,  # a run of an earlier version knows fewer keys
        "checkpoint": asked["checkpoint"] | frozen["checkpoint"],
        "invariance": "samples",
        "logger": {},
    }
    return asked | frozen | {name: asked[name] for name in how} | merged


def _checkpoint_problems(directory: RunDirectory, which: str | int) -> list[Problem]:
    """Return a problem if the run does not have the requested checkpoint. Nothing is verified."""
    if not isinstance(which, (str, int)):
        return []  # the schema reports it
    found = candidates(directory.checkpoints)
    path = directory.checkpoint_path(which)
    if odd := directory.odd_files():
        return [_no_run(f"{directory.path / odd[0]} is not a plain file")]
    if found if path is None else path.exists():
        return []
    steps = ", ".join(str(step_of(path)) for path in reversed(found)) or "none"
    what = f"{which}, but there is no {path or directory.checkpoints / 'step_*'}"
    return [Problem("run.checkpoint", what, f"last, best, final, a path, or a step (of those there are: {steps})",
                    code=Exit.NO_VALID_CHECKPOINT)]  # fmt: skip
