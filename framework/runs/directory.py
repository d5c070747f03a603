"""A run's directory: where its files are, and its summary."""

import json
import os
import re
from pathlib import Path
from typing import Any

from framework.config.frozen_file import frozen_run_id
from framework.runs.lock import Lock
from framework.runtime.files import write_atomically
from framework.runtime.log import LOGGER
from framework.runtime.secrets import redact

RECORD = ("lock", "config.yaml", "metrics.jsonl", "summary.json", "train.log")
_FILES = (*RECORD, "model.safetensors", "curves.png", "evaluations.jsonl")
_FOLDERS = ("checkpoints", "export", "tensorboard", "wandb", "slurm", "profile")


class RunDirectory:
    """The paths of a run. Creating the object touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.weights = path / "model.safetensors"
        self.log = path / "train.log"
        self.curves = path / "curves.png"
        self.evaluations = path / "evaluations.jsonl"
        self.export = path / "export"
        self.profile = path / "profile"

    def strangers(self) -> list[str]:
        """Return the names in the directory that are no run's, if it is none: it has no frozen configuration."""
        if frozen_run_id(self.path) is not None or not self.path.is_dir():
            return []
        return sorted({name for name in os.listdir(self.path) if not name.startswith(".")}.difference(_FILES, _FOLDERS))

    def odd_files(self) -> list[str]:
        """Return which of a run's files are none: a link, through which a run would write elsewhere, or a pipe."""
        paths = [self.path / name for name in _FILES]
        return [path.name for path in paths if path.is_symlink() or (path.exists() and not path.is_file())]

    def read_summary(self) -> dict[str, Any]:
        """Return the summary, or an empty one if there is none yet. What is not of its kind is left out."""
        try:
            summary = json.loads(self.summary.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(summary, dict):
            return {}
        if not isinstance(summary.get("status", ""), str):
            del summary["status"]
        if not _is_metrics(summary.get("metrics", {})):
            del summary["metrics"]
        return summary

    @property
    def job_id(self) -> str | None:
        """The Slurm job that it was submitted as, by its latest submission; of one in an array, 12_3."""
        job_id = self.read_summary().get("job_id")
        return job_id if isinstance(job_id, str) and re.fullmatch(r"\d+(_\d+)?", job_id) else None

    @property
    def host(self) -> str:
        """The machine of the process that holds the run now, or held it last."""
        return str(Lock(self.path).holder().get("host", ""))

    def update_summary(self, **values: Any) -> None:
        """Change some of the summary's values. Rank 0, or the parent when the workers are gone."""
        values = {name: redact(value) if isinstance(value, str) else value for name, value in values.items()}
        write_atomically(self.summary, json.dumps(self.read_summary() | values, indent=1) + "\n")

    def record_end(self, **values: Any) -> None:
        """Write into the summary how the run ended. A disk that refuses is a warning: the exit code says the same."""
        try:
            self.update_summary(**values)
        except OSError as error:
            LOGGER.warning("%s could not be written: %s", self.summary, error.strerror)

    @property
    def state(self) -> str:
        """`missing`, `running`, `killed` (without a last word), `preempted`, `failed` or `finished`."""
        if Lock(self.path).is_held:
            return "running"
        status = self.read_summary().get("status", "missing")
        is_cut = status == "running" or (status == "finished" and not self._has_whole_weights())
        return "killed" if is_cut else str(status)

    @property
    def is_finished(self) -> bool:
        return self.read_summary().get("status") == "finished" and self._has_whole_weights()

    def _has_whole_weights(self) -> bool:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.weights, framework="np"):  # reads the header, and compares it with the file's size
                return True
        except (OSError, SafetensorError):
            return False

    def move_aside(self) -> Path:
        """Rename the whole directory to the next free `NAME.old-N`, so that a fresh one can take its place."""
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        os.rename(self.path, aside)
        return aside


def _is_metrics(metrics: Any) -> bool:
    """Return whether it is a row (of numbers by names) for each `last` and `best` of each split."""
    splits = metrics.values() if isinstance(metrics, dict) else [None]
    return all(isinstance(split, dict) and all(isinstance(row, dict) for row in split.values()) for split in splits)
