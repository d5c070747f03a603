"""The interface of loggers: a sink receives a run's rows. Only rank 0 has sinks."""

import heapq
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from framework.runs.media import list_media
from framework.runs.metrics_file import iterate_rows, numbers_of


@dataclass(frozen=True)
class Samples:
    """A few training samples in their stored form, for display: as images or as texts."""

    images: list[Any] | None  # nested lists (B, C, H, W) with values from 0 to 255; C is 1 or 3
    texts: list[str] | None


@dataclass(frozen=True)
class RunInfo:
    """The facts that a sink gets about the run that it records."""

    directory: Path
    run_id: str
    name: str
    step: int  # the step at which the run starts or continues
    total_steps: int
    config: dict[str, Any]  # for display only, not for settings
    record_id: str = ""  # id of the run's record: the same after an interruption, new when the run starts from step 0
    group: str | None = None  # the sweep that contains the run
    samples: Samples | None = None
    monitor: str = "val/loss"  # SPLIT/METRIC: the value of checkpoint.monitor
    direction: str = "min"  # min or max: which direction of the monitor is better
    best: float | None = None  # the monitor's best value before `step`
    commit: str | None = None  # of the folder of the start, if it is in a repository
    code: dict[str, str] = field(default_factory=dict)  # the files of the user's modules that the run reaches, by module


class Sink(Protocol):
    """The protocol of a logger's class. The class gets the keys of its YAML as arguments.

    It is constructed and called in a separate process (framework/loggers/background.py). An error in it is only a warning.
    When the run ends, `close` must return within `timeout_s` (a key of its YAML).
    """

    def open(self, run: RunInfo) -> None:
        """Start to record. Rows after `run.step` from before an interruption are void; metrics.jsonl has the other rows."""

    def log(self, row: dict[str, Any]) -> None:
        """Receive the numbers of one row of metrics.jsonl. If the sink's `takes_lists` is true, receive its lists too."""

    # A sink may also have `media(item)`, which receives what a part has logged (framework/runs/media.py)

    def close(self, summary: dict[str, Any]) -> None:
        """Stop recording. `summary` is the content of summary.json. `open` may follow, for an earlier step."""


def replay(sink: Any, run: RunInfo, *, first: int = 0) -> None:
    """Let a sink take the rows and the media of the steps from `first` to `run.step` again, in the order of the steps."""
    shown = (lambda row: row) if getattr(sink, "takes_lists", False) else numbers_of
    rows = ((row["step"], sink.log, shown(row)) for row in iterate_rows(run.directory / "metrics.jsonl", until=run.step))
    found = list_media(run.directory / "media", until=run.step) if hasattr(sink, "media") else []
    for step, take, record in heapq.merge(rows, ((item.step, sink.media, item) for item in found), key=itemgetter(0)):
        if step >= first:
            take(record)
