"""What a run measured: the rows of `metrics.jsonl`, and the last and best of them."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from framework.files import flush_directory, write_atomically
from framework.log import LOGGER
from framework.outcome import Unfit

Row = dict[str, Any]

# What a clock or the machine has measured: it differs from one time to the next, and between ways to execute a run.
MACHINE = (
    "samples_per_s", "tokens_per_s", "step_s", "data_s", "forward_backward_s", "optimizer_s", "checkpoint_s",
    "mfu", "memory_gib", "goodput",
)  # fmt: skip
MAXIMISED = ("accuracy", "top5")  # of the metrics that we know, those of which more is better


def is_maximised(name: str, *, monitor: str, mode: str) -> bool:
    """Return whether more of SPLIT/METRIC is better: of the monitored one the configuration says so."""
    return mode == "max" if name == monitor else name.partition("/")[2] in MAXIMISED


class MetricsFile:
    """`metrics.jsonl`: one row a line, each step once. Rank 0 only."""

    def __init__(self, path: Path, *, step: int) -> None:
        """Open for appending, having cut back what was written after `step`, where the run continues."""
        if path.exists():
            write_rows(path, [row for row in read_rows(path) if row["step"] <= step])
        elif step:
            LOGGER.warning("%s is gone: the rows before step %d are lost", path, step)
        self._file = open(path, "ab", buffering=0)
        flush_directory(path.parent)
        self._unwritten = bytearray()

    def log(self, row: Row) -> None:
        """Write a row. What a full disk does not take is kept, and tried again with the next row."""
        self._unwritten += (json.dumps(row) + "\n").encode()
        with contextlib.suppress(OSError):  # `flush` raises it
            self._write()

    def _write(self) -> None:
        while self._unwritten:
            del self._unwritten[: self._file.write(self._unwritten)]

    def flush(self) -> None:
        """Put the rows on the disk: before a checkpoint that counts on them is committed. OSError if it refuses."""
        self._write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a `metrics.jsonl`, in order; what is not a row (a line that a crash cut short) is left out."""
    return rows_in(path.read_bytes())


def rows_in(content: bytes) -> list[Row]:
    """Return the rows among the lines of `content`."""
    rows = []
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _is_row(row):
            rows.append(row)
    return rows


def _is_row(row: Any) -> bool:
    if not (isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("split"), str)):
        return False
    return all(value is None or isinstance(value, (int, float)) for name, value in row.items() if name != "split")


def write_rows(path: Path, rows: list[Row]) -> None:
    """Replace a `metrics.jsonl` by these rows."""
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def require_metric(name: str, row: Row, *, key: str) -> None:
    """Raise Unfit if a row lacks the metric that `key` names: whether a task measures it may depend on the data."""
    if name not in row:
        measured = ", ".join(
            other for other in row if other not in ("step", "split", "lr", "grad_norm", "epoch", *MACHINE)
        )
        raise Unfit(f"{key}: {row['split']}/{name} is not measured here (there are {measured})")


class Tracker:
    """The last and the best row of each split. `monitor` is SPLIT/METRIC; other splits are compared by their loss."""

    def __init__(self, *, monitor: str, mode: str) -> None:
        self.monitor_split, _, self.monitor_metric = monitor.partition("/")
        self.mode = mode
        self.splits: dict[str, dict[str, Row]] = {}

    def note(self, row: Row) -> None:
        """Take a row in. Unfit if it lacks what is monitored."""
        metric = self.monitor_metric if row["split"] == self.monitor_split else "loss"
        sign = -1 if metric == self.monitor_metric and self.mode == "max" else 1
        require_metric(metric, row, key="checkpoint.monitor")
        split = self.splits.setdefault(row["split"], {})
        before = split.get("best", {}).get(metric)  # None also where another run, continued from, did not measure it
        is_best = before is None or sign * row[metric] < sign * before
        split["last"] = row
        if is_best:
            split["best"] = row

    def monitored(self, *, step: int) -> float | None:
        """Return the monitored value, if it was measured at `step`."""
        row = self.splits.get(self.monitor_split, {}).get("last")
        return row[self.monitor_metric] if row is not None and row["step"] == step else None


class Patience:
    """Early stopping: how many evaluations in a row brought no improvement."""

    def __init__(self, *, patience: int | None, monitor: str, mode: str, min_delta: float) -> None:
        self.patience = patience
        self.split, _, self.metric = monitor.partition("/")
        self.sign = -1.0 if mode == "max" else 1.0
        self.min_delta = min_delta
        self.best: float | None = None
        self.num_bad = 0

    def note(self, row: Row) -> None:
        if row["split"] != self.split:
            return
        require_metric(self.metric, row, key="trainer.early_stopping.monitor")
        value = self.sign * row[self.metric]
        if self.best is None or value < self.best - self.min_delta:
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.num_bad = state["best"], state["num_bad"]

    @property
    def is_exhausted(self) -> bool:
        return self.patience is not None and self.num_bad >= self.patience
