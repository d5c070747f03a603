"""A run's directory: the paths of its files, and its summary."""

import itertools
import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

from framework.checkpoint.manifest import directory_name
from framework.config.frozen_file import recall
from framework.runtime.files import facts_in, flush_to_disk, replaced_by, tail, write_atomically
from framework.runtime.lock import Lock
from framework.runtime.log import LOGGER
from framework.runtime.secrets import redact

RECORD_FILES = ("lock", "config.yaml", "metrics.jsonl", "summary.json", "train.log")
_FILES = (*RECORD_FILES, "model.safetensors", "curves.png", "evaluations.jsonl", "provenance.json",
          "micro_batch_size.json")  # fmt: skip
_FOLDERS = ("checkpoints", "export", "predictions", "tensorboard", "wandb", "slurm", "profile", "compiled", "media", "loggers")
_BESIDE = (".eval", ".predict", ".export")  # folders of commands that work on a run, which may be active


class RunDirectory:
    """The paths of a run. The constructor does not access the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path = path if path.name not in ("", "..") else Path(os.path.abspath(path))  # the folder's name is needed
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.weights = path / "model.safetensors"
        self.log = path / "train.log"
        self.curves = path / "curves.png"
        self.evaluations = path / "evaluations.jsonl"
        self.export = path / "export"
        self.predictions = path / "predictions"
        self.profile = path / "profile"
        self.media = path / "media"
        self.micro_batch_size = path / "micro_batch_size.json"

    def beside(self) -> list["RunDirectory"]:
        """Return the folders of evaluations, predictions and exports of the run."""
        return [RunDirectory(self.path / name) for name in _BESIDE if (self.path / name).is_dir()]

    def strangers(self) -> list[str]:
        """Return the names of files that do not belong to a run."""
        if not self.path.is_dir():
            return []
        return sorted(name for name in os.listdir(self.path) if not _is_a_runs(name))

    def odd_files(self) -> list[str]:
        """Return the run's files that are not plain files: a link (the run would write to another place) or a pipe."""
        paths = [self.path / name for name in _FILES]
        return [path.name for path in paths if path.is_symlink() or (path.exists() and not path.is_file())]

    def read_summary(self) -> dict[str, Any]:
        """Return the summary, or {} if it does not exist yet. Values of a wrong type are left out."""
        summary = dict[str, Any]()
        with suppress(OSError):
            if self.summary.is_file():  # reading a pipe would never end
                summary = facts_in(self.summary.read_bytes())
        return {name: value for name, value in summary.items() if name not in _KINDS or _is_sound(name, value)}

    def checkpoint_path(self, which: str | int) -> Path | None:
        """Return the path of the checkpoint or weights file that `run.checkpoint` names. Return None for `last` and `best`."""
        if which in ("last", "best"):
            return None
        if which == "final":
            return self.weights
        return self.checkpoints / directory_name(which) if isinstance(which, int) else Path(which)

    @property
    def job_id(self) -> str | None:
        """The Slurm job of the latest submission. It has the form 12_3 for a job of an array."""
        job_id = self.read_summary().get("job_id")
        return job_id if isinstance(job_id, str) and re.fullmatch(r"\d+(_\d+)?", job_id) else None

    def last_lines_of_job(self) -> list[str]:
        """Return the last lines of output of the latest Slurm job, or [] if there are none."""
        path = Path(str(self.read_summary().get("job_output")))
        lines = tail(path, num_bytes=4096).decode(errors="replace").splitlines() if path.is_file() else []
        return [line for line in lines if line.strip()]

    def update_summary(self, *, is_flushed: bool = True, **values: Any) -> None:
        """Change some values of the summary. Only rank 0 may call this, or the parent after the workers have ended."""
        values = {name: redact(value) if isinstance(value, str) else value for name, value in values.items()}
        write_atomically(self.summary, json.dumps(self.read_summary() | values, indent=1) + "\n", is_flushed=is_flushed)

    def record_end(self, **values: Any) -> None:
        """Record in the summary how the run ended. A disk error is only a warning, because the exit code reports the end."""
        try:
            self.update_summary(**values)
        except OSError as error:
            LOGGER.warning("%s could not be written: %s", self.summary, error.strerror)

    @property
    def state(self) -> str:
        """The state: `missing`, `running`, `killed` (the run could not record its end), `preempted`, `failed` or `finished`."""
        if Lock(self.path).is_held:
            return "running"
        status = self.read_summary().get("status", "missing")
        is_cut = status == "running" or (status == "finished" and not self.has_whole_weights)
        return "killed" if is_cut else str(status)

    @property
    def is_finished(self) -> bool:
        return self.read_summary().get("status") == "finished" and self.has_whole_weights

    @property
    def has_whole_weights(self) -> bool:
        """Whether `model.safetensors` exists and is complete."""
        try:
            with safe_open(self.weights, framework="np"):  # this reads the header and compares it with the file's size
                return True
        except (OSError, SafetensorError):
            return False

    def replace_draft(self) -> None:
        """Delete what an earlier draft has left here. Whatever is not a draft stays."""
        with suppress(ValueError):
            if recall(self.path).get("draft") is True:
                shutil.rmtree(self.move_aside())

    def move_aside(self) -> Path:
        """Move the run's files into the next free `NAME.old-N`. The lock and the user's own files stay.

        The configuration is moved last: after an interruption, the same command moves the rest.
        """
        candidates = (self.path.with_name(f"{self.path.name}.old-{number}") for number in itertools.count(1))
        aside = next(path for path in candidates if not path.exists())
        aside.mkdir()
        names = [name for name in os.listdir(self.path) if _is_a_runs(name) and name != "lock"]
        for name in sorted(names, key=lambda name: name == "config.yaml"):
            (self.path / name).rename(aside / name)
        flush_to_disk(aside)
        flush_to_disk(self.path)
        return aside


def _is_a_runs(name: str) -> bool:
    return name in (*_FILES, *_FOLDERS, *_BESIDE) or replaced_by(name) in (*_FILES, *_FOLDERS)


class _Origin(TypedDict):
    """The checkpoint of another run with which a run began."""

    path: str
    record_id: str | None
    step: int


class _Rows(TypedDict):  # of metrics_file.Mark
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]  # as pydantic documents it
    num_rows: int
    num_bytes: int
    crc32: int


_KINDS: dict[str, TypeAdapter[Any]] = {  # of the summary's values that are used again
    "status": TypeAdapter(str),
    "metrics": TypeAdapter(dict[str, dict[str, dict[str, Any]]]),
    "restarts": TypeAdapter(int),
    "continued_at": TypeAdapter(list[int]),
    "step": TypeAdapter(int),
    "rows": TypeAdapter(_Rows),
    "unlogged": TypeAdapter(list[Any]),
    "began_from": TypeAdapter(_Origin | None),
}


def _is_sound(name: str, value: Any) -> bool:
    try:
        _KINDS[name].validate_python(value, strict=True)
    except ValidationError:
        return False
    return True
