"""Where a run begins: at step 0, or from another run's checkpoint, which `run.resume` names. It does not change later."""

import os
from pathlib import Path
from typing import Any

from framework.checkpoint.manifest import candidates, checkpoints_of, step_of
from framework.runs.directory import RunDirectory
from framework.runtime.objects import is_url
from framework.runtime.problem import Problem


def resume_problems(resume: str, directory: RunDirectory, *, is_draft: bool = False) -> list[Problem]:
    """Return why a run cannot start from what `run.resume` names, or cannot go on because it began elsewhere.

    A URL is checked when it is fetched. A draft replaces what is in the directory.
    """
    has_begun = not is_draft and (bool(candidates(directory.checkpoints)) or directory.is_finished)
    if resume == "must" and not has_begun:
        return [Problem("run.resume", f"must, but {directory.path} has no checkpoint", "auto, or the path of a run")]
    if has_begun and resume != "never":
        return _origin_problems(resume, directory)
    if resume in ("auto", "never") or is_url(resume):
        return []
    path = Path(resume)
    if not resume or not os.path.isdir(path):
        return [Problem("run.resume", f"no run or checkpoint at {resume!r}", "auto, never, must, or a path")]
    if step_of(path) is None and not candidates(checkpoints_of(path)):
        return [Problem("run.resume", f"{resume!r} has no checkpoint", "the path of a run or of a checkpoint")]
    return []


def _origin_problems(resume: str, directory: RunDirectory) -> list[Problem]:
    """Refuse another beginning than that of the run that is there: it has computed something else than the command asks for."""
    summary = directory.read_summary()
    origin = summary.get("began_from")
    is_named = resume not in ("auto", "must")
    if "began_from" not in summary or (_is_origin(resume, origin) if is_named and origin else is_named == bool(origin)):
        return []
    where = f"from {origin['path']}, of step {origin['step']}" if origin else "at step 0"
    what = f"the run in {directory.path} began {where}, and not {f'from {resume}' if is_named else 'at step 0'}"
    same = f"run.resume={origin['path']} continues it" if origin else "run.resume=auto continues it"
    return [Problem("run.resume", what, f"{same}; run.resume=never starts over, another name= is another run")]


def _is_origin(resume: str, origin: dict[str, Any]) -> bool:
    """Return whether `resume` names a run's origin: by its path of that time, or where it is now. Of a URL it is not known."""
    if is_url(resume) or os.path.realpath(resume) == origin["path"]:
        return True
    record = RunDirectory(checkpoints_of(Path(resume)).parent).read_summary().get("record_id")
    return record == origin["record_id"] is not None and step_of(Path(resume)) in (None, origin["step"])
