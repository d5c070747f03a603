"""The seam: a sink takes a run's rows. Sinks live on rank 0 only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class RunInfo:
    """What a sink may know of the run that it records."""

    directory: Path
    run_id: str
    name: str
    step: int  # where the run starts or continues
    total_steps: int
    config: dict[str, Any]  # to show, not to read settings from


class Sink(Protocol):
    def open(self, run: RunInfo) -> None:
        """Start recording; what was recorded after `run.step` before an interruption is void."""

    def log(self, row: dict[str, Any]) -> None:
        """Take one row of metrics.jsonl."""

    def close(self, summary: dict[str, Any]) -> None:
        """Stop recording; `summary` is the content of summary.json."""
