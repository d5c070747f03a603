"""mode=eval and mode=export: a run's frozen configuration says what, the command line how. torch is not imported."""

from pathlib import Path
from typing import Any

from framework.build.components import INIT
from framework.checkpoint.manifest import candidates, step_of
from framework.config.compose import parse
from framework.config.frozen_file import recall
from framework.config.modes import _ANEW
from framework.modes.checkpoint_choice import missing_packages, place_of
from framework.runs.directory import RunDirectory
from framework.runtime.exits import Exit
from framework.runtime.problem import Problem, shown

Config = dict[str, Any]


def revisit(composed: Config, overrides: list[str]) -> tuple[Config, list[Problem]]:
    """Return the configuration by which a run is evaluated or exported, or what is wrong with that.

    `composed` is what the command line composes to by itself: it gives how, and its `run.dir` names the run.
    """
    mode, place = composed["mode"], composed["run"]["dir"]
    given = [override.key_or_group for override in map(parse, overrides) if override is not None]
    if "run.dir" not in given or not isinstance(place, str):
        what = "is not given" if "run.dir" not in given else f"{shown(place)} is not valid"
        return composed, [Problem("run.dir", f"{what}: mode={mode} is about one run", "run.dir=runs/NAME/ID")]
    directory = RunDirectory(Path(place))
    anew = [key for key in given if _is_below(key, _ANEW[mode])]
    problems = [Problem(key, f"is not to be given to mode={mode}: it takes the run as it is",
                        f"only {', '.join(_ANEW[mode][1:])}") for key in given if key not in anew]  # fmt: skip
    if composed["launch"]["kind"] != "local" or composed["launch"]["nnodes"] not in (1, "1"):
        problems.append(Problem("launch", f"mode={mode} is no job, and runs on one node",
                                "launch=local, or torchrun within a job of your own"))  # fmt: skip
    if problems:
        return composed, problems
    try:
        frozen = recall(directory.path)
    except ValueError as error:
        return composed, [_no_run(str(error))]
    problems = _checkpoint_problems(directory, composed["run"]["checkpoint"]) + _format_problems(composed["export"])
    return _merged(composed, frozen, anew=anew), problems


def _is_below(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _no_run(what: str) -> Problem:
    return Problem("run.dir", what, code=Exit.NO_VALID_CHECKPOINT)


def _merged(composed: Config, frozen: Config, *, anew: list[str]) -> Config:
    """Take from `frozen` what the run is; leave out what only training does, which a strategy might refuse."""
    config = composed | frozen
    config |= {name: composed[name] for name in ("mode", "eval", "export", "parallel", "launch", "backend")}
    config |= {name: composed[name] for name in ("precision", "micro_batch_size") if _is_any_below(anew, name)}
    if "dataset.num_workers" in anew:
        config["dataset"] = frozen["dataset"] | {"num_workers": composed["dataset"]["num_workers"]}
    config["run"] = composed["run"] | {"id": frozen["run"]["id"]}
    # the file of a warm start is not asked for: the weights are a checkpoint's
    config["model"] = {name: value for name, value in frozen["model"].items() if name not in INIT}
    off = {"compile": False, "activation_checkpointing": False, "sync_batchnorm": False}
    config["trainer"] = composed["trainer"] | frozen["trainer"] | off  # a run of an earlier version knows fewer keys
    config["checkpoint"] = composed["checkpoint"] | frozen["checkpoint"]
    return config | {"invariance": "samples", "logger": {}}


def _is_any_below(keys: list[str], section: str) -> bool:
    return any(_is_below(key, (section,)) for key in keys)


def _checkpoint_problems(directory: RunDirectory, which: str | int) -> list[Problem]:
    """Say what the run has, if not the checkpoint that is asked for. Nothing is verified."""
    if not isinstance(which, (str, int)):
        return []  # the schema will say so
    found = candidates(directory.checkpoints)
    path = place_of(which, directory=directory)
    if odd := directory.odd_files():
        return [_no_run(f"{directory.path / odd[0]} is not a plain file")]
    if found if path is None else path.exists():
        return []
    steps = ", ".join(str(step_of(path)) for path in reversed(found)) or "none"
    what = f"{which}, but there is no {path or directory.checkpoints / 'step_*'}"
    return [Problem("run.checkpoint", what, f"last, best, final, a path, or a step (of those there are: {steps})",
                    code=Exit.NO_VALID_CHECKPOINT)]  # fmt: skip


def _format_problems(section: Config) -> list[Problem]:
    formats = section.get("formats")
    missing = missing_packages("onnx") if isinstance(formats, list) and "onnx" in formats else []
    if not missing:
        return []
    return [Problem("export.formats", f"onnx needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")]
