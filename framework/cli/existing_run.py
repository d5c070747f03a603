"""mode=eval and mode=export: a run's frozen configuration, with a few keys of the command line. torch is not imported."""

from pathlib import Path
from typing import Any

from framework.build.components import INIT
from framework.checkpoint.manifest import candidates, step_of
from framework.config.compose import Composed
from framework.config.frozen_file import recall
from framework.config.modes import Mode
from framework.runs.directory import RunDirectory
from framework.runtime.exits import Exit
from framework.runtime.extras import missing_extra
from framework.runtime.problem import Problem, shown

Plain = dict[str, Any]


def of_existing_run(composed: Composed, mode: Mode) -> Composed:
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
                for key in given if not _is_below(key, mode.may_give)]  # fmt: skip
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


def _is_below(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _no_run(what: str) -> Problem:
    return Problem("run.dir", what, code=Exit.NO_VALID_CHECKPOINT)


def _merged(asked: Plain, frozen: Plain, *, given: list[str]) -> Plain:
    """Take the run from `frozen`, without the options of training alone, which a strategy might refuse."""
    how = ["mode", "eval", "export", "parallel", "launch", "backend"]
    how += [name for name in ("precision", "micro_batch_size") if any(_is_below(key, (name,)) for key in given)]
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
    path = directory.checkpoint(which)
    if odd := directory.odd_files():
        return [_no_run(f"{directory.path / odd[0]} is not a plain file")]
    if found if path is None else path.exists():
        return []
    steps = ", ".join(str(step_of(path)) for path in reversed(found)) or "none"
    what = f"{which}, but there is no {path or directory.checkpoints / 'step_*'}"
    return [Problem("run.checkpoint", what, f"last, best, final, a path, or a step (of those there are: {steps})",
                    code=Exit.NO_VALID_CHECKPOINT)]  # fmt: skip
