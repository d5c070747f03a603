"""Which checkpoint of a run `run.checkpoint` names."""

from pathlib import Path

from framework.checkpoint.manifest import directory_name
from framework.runs.directory import RunDirectory


def place_of(which: str | int, *, directory: RunDirectory) -> Path | None:
    """Return where the checkpoint or the file of weights is that `run.checkpoint` names; None of the last and the best."""
    if which in ("last", "best"):
        return None
    if which == "final":
        return directory.weights
    return directory.checkpoints / directory_name(which) if isinstance(which, int) else Path(which)
