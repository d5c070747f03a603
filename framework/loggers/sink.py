"""The seam: a sink takes a run's rows. Sinks live on rank 0 only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Samples:
    """A few training samples as they are stored, to look at; of the two there is what the data can be shown as."""

    images: list[Any] | None  # nested, (B, C, H, W), each value from 0 to 255; C is 1 or 3
    texts: list[str] | None


@dataclass(frozen=True)
class RunInfo:
    """What a sink may know of the run that it records."""

    directory: Path
    run_id: str
    name: str
    step: int  # where the run starts or continues
    total_steps: int
    config: dict[str, Any]  # to show, not to read settings from
    record_id: str = ""  # of this record of the run: the same after any interruption, another when the run starts over
    group: str | None = None  # what the run is a part of: a sweep
    samples: Samples | None = None


class Sink(Protocol):
    """A logger's class is one, and gets the keys of its YAML as arguments.

    It is made and called in a process of its own (framework/loggers/background.py): what it raises is a warning, and
    when the run ends, `close` has `timeout_s` (a key, if it has one) to come back.
    """

    def open(self, run: RunInfo) -> None:
        """Start recording; what was recorded after `run.step` before an interruption is void.

        What a kill has lost of the rows up to `run.step` is in metrics.jsonl.
        """

    def log(self, row: dict[str, Any]) -> None:
        """Take one row of metrics.jsonl."""

    def close(self, summary: dict[str, Any]) -> None:
        """Stop recording; `summary` is the content of summary.json. `open` may follow: the run went back to an earlier step."""
