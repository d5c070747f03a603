"""The seam: a sink takes a run's rows. Only rank 0 has sinks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Samples:
    """A few training samples as they are stored, to look at: as images or as texts."""

    images: list[Any] | None  # nested, (B, C, H, W), each value from 0 to 255; C is 1 or 3
    texts: list[str] | None


@dataclass(frozen=True)
class RunInfo:
    """What a sink can know of the run that it records."""

    directory: Path
    run_id: str
    name: str
    step: int  # where the run starts or continues
    total_steps: int
    config: dict[str, Any]  # to show, not to read settings from
    record_id: str = ""  # of the run's record: the same after an interruption, a new one when the run starts from step 0
    group: str | None = None  # the sweep that the run is a part of
    samples: Samples | None = None
    monitor: str = "val/loss"  # SPLIT/METRIC: what checkpoint.monitor names
    direction: str = "min"  # min or max: what is better of it
    best: float | None = None  # its best value before `step`


class Sink(Protocol):
    """The protocol of a logger's class, which gets the keys of its YAML as arguments.

    It is made and called in a process of its own (framework/loggers/background.py): an error in it is a warning, and when
    the run ends, `close` must return within `timeout_s` (a key of its YAML).
    """

    def open(self, run: RunInfo) -> None:
        """Start recording. Rows after `run.step` from before an interruption are void; metrics.jsonl has the others."""

    def log(self, row: dict[str, Any]) -> None:
        """Take one row of metrics.jsonl: its numbers; of a sink whose `takes_lists` is true, its lists of numbers too."""

    def close(self, summary: dict[str, Any]) -> None:
        """Stop recording; `summary` is the content of summary.json. `open` may follow, for an earlier step."""
