"""Checks of a run's directory: writable, not another run's, with a checkpoint if the run must continue."""

import os
import shutil
from pathlib import Path

from framework.checkpoint.manifest import candidates, checkpoints_of, step_of
from framework.config.frozen_file import frozen_run_id
from framework.config.schema import RunSection
from framework.runs.directory import RunDirectory
from framework.runtime.problem import Problem, shown


def place_problems(run: RunSection) -> list[Problem]:
    """Return why a run cannot start or continue in its directory."""
    directory = RunDirectory(Path(run.dir))
    if problems := writing_problems(run) or _check_contents(directory):
        return problems
    there = frozen_run_id(directory.path)
    if there not in (None, run.id):
        what = f"{directory.path} holds another run ({there}, this is {run.id})"
        problems = [Problem("run.dir", what, "another directory, or that run's own command")]
    return problems + _check_resume(run.resume, directory)


def writing_problems(run: RunSection) -> list[Problem]:
    """Return why a run's directory cannot be made or written."""
    path = Path(run.dir)
    if max(map(len, map(os.fsencode, path.parts))) > 255 or len(os.fsencode(path.absolute())) > 3000:
        return [Problem("run.dir", "is too long for a path", "255 bytes between slashes, 3000 in all")]
    # os.path: Path raises if a parent directory may not be entered
    nearest = next(str(parent) for parent in [path, *path.absolute().parents] if os.path.lexists(parent))
    key = "run.dir" if os.path.exists(path) else "run.root"
    if not os.path.isdir(nearest):
        return [Problem(key, f"{nearest} is not a directory", "a directory, or a path where one can be made")]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [Problem(key, f"{nearest} cannot be written", "a directory that can")]
    if shutil.disk_usage(nearest).total == 0:
        return [Problem(key, f"{nearest} cannot hold files", "a directory on a disk")]
    return []


def _check_contents(directory: RunDirectory) -> list[Problem]:
    """Refuse a directory with files that are not a run's."""
    if odd := directory.odd_files():
        what = f"{directory.path / odd[0]} is not a plain file"
        return [Problem("run.dir", what, "a run writes to none that is a link or a pipe")]
    if strangers := directory.strangers():
        what = f"{directory.path} is not a run's: it holds {shown(strangers[0])}"
        return [Problem("run.dir", what, "a directory of its own, which the run makes")]
    return []


def _check_resume(resume: str, directory: RunDirectory) -> list[Problem]:
    if resume == "must" and not candidates(directory.checkpoints):
        return [Problem("run.resume", f"must, but {directory.path} has no checkpoint", "auto, or the path of a run")]
    if resume in ("auto", "never", "must"):
        return []
    path = Path(resume)
    if not resume or not os.path.isdir(path):
        return [Problem("run.resume", f"no run or checkpoint at {resume!r}", "auto, never, must, or a path")]
    if step_of(path) is None and not candidates(checkpoints_of(path)):
        return [Problem("run.resume", f"{resume!r} has no checkpoint", "the path of a run or of a checkpoint")]
    return []
