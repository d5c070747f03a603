"""The configuration of mode=eval, predict and export: a run's frozen configuration, with a few keys from the command line."""

from pathlib import Path

from framework.checkpoint.manifest import candidates, step_of
from framework.config.compose import Composed
from framework.config.frozen_file import recall
from framework.config.identity import is_below
from framework.config.modes import Mode
from framework.config.validation import validate
from framework.runs.directory import RunDirectory
from framework.runtime.exits import Exit
from framework.runtime.problem import Problem, missing_extra


def of_existing_run(composed: Composed, mode: Mode) -> Composed:
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
        frozen = validate(composed._replace(config=recall(directory.path)))
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
