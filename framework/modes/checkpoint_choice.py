"""Which checkpoint of a run `run.checkpoint` names, and what a format of mode=export needs."""

import importlib.util
from pathlib import Path

from framework.checkpoint.manifest import directory_name
from framework.runs.directory import RunDirectory


def missing_packages(export_format: str) -> list[str]:
    """Return which packages a format of mode=export needs that are not installed."""
    needed = {"onnx": ["onnx", "onnxscript", "onnxruntime"]}.get(export_format, [])
    return [name for name in needed if importlib.util.find_spec(name) is None]


def place_of(which: str | int, *, directory: RunDirectory) -> Path | None:
    """Return where the checkpoint or the file of weights is that `run.checkpoint` names; None of the last and the best."""
    if which in ("last", "best"):
        return None
    if which == "final":
        return directory.weights
    return directory.checkpoints / directory_name(which) if isinstance(which, int) else Path(which)
