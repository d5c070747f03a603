"""The rows of `metrics.jsonl`: what a run measured."""

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

from framework.runtime.files import flush_directory, write_atomically
from framework.runtime.log import LOGGER

Row = dict[str, Any]  # numbers by name; the rows of a file may have lists of numbers too

# Values that a clock or the machine has measured: they differ each time, and between ways to execute a run.
MACHINE = (
    "samples_per_s", "tokens_per_s", "step_s", "data_s", "forward_backward_s", "optimizer_s", "checkpoint_s",
    "mfu", "memory_gib", "goodput",
)  # fmt: skip
NOT_CURVES = ("step", "split", "epoch", "lr", "grad_norm", *MACHINE)
MAXIMISED = ("accuracy", "top5")  # known metrics of which more is better


def is_maximised(name: str, *, monitor: str, mode: str) -> bool:
    """Return whether more of SPLIT/METRIC is better: for the monitored metric the configuration says so."""
    return mode == "max" if name == monitor else name.partition("/")[2] in MAXIMISED


def is_curve(name: str) -> bool:
    """Return whether a column is drawn, shown on a terminal and listed; not what a run is at, nor a detail: NAME:MODULE."""
    return name not in NOT_CURVES and ":" not in name


class MetricsFile:
    """`metrics.jsonl`: one row a line, each step once. Rank 0 only."""

    def __init__(self, path: Path, *, step: int, num_rows: int | None = None) -> None:
        """Open for appending. Rows after `step`, where the run continues, are removed first, and all but one of a step's.

        `num_rows`: how many there were up to that step; fewer are warned of.
        """
        rows: dict[tuple[int, str], Row] = {}
        if path.exists():
            rows = {(row["step"], row["split"]): row for row in _whole_rows(path.read_bytes()) if row["step"] <= step}
            write_rows(path, [*rows.values()])
        elif step:
            LOGGER.warning("%s is gone: the rows before step %d are lost", path, step)
        self.num_rows = sum(split != "test" for _, split in rows)  # a run that begins with this one does not take tests over
        if path.exists() and num_rows is not None and self.num_rows < num_rows:
            LOGGER.warning("%s has lost %d of the %d rows before step %d", path, num_rows - self.num_rows, num_rows, step + 1)
        self._file = open(path, "ab", buffering=0)
        flush_directory(path.parent)
        self._unwritten = bytearray()

    def log(self, row: Row) -> None:
        """Write a row. A row that a full disk does not take is kept, and written with the next row."""
        self.num_rows += row["split"] != "test"
        self._unwritten += (json.dumps(row) + "\n").encode()
        with contextlib.suppress(OSError):  # `flush` raises it
            self._write()

    def _write(self) -> None:
        while self._unwritten:
            del self._unwritten[: self._file.write(self._unwritten)]

    def flush(self) -> None:
        """Flush the rows to the disk: before a checkpoint that counts on them is committed. OSError if that fails."""
        self._write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path, *, until: float = math.inf) -> list[Row]:
    """Return a `metrics.jsonl`'s rows until a step, in order, without damaged rows (a line that a crash cut short)."""
    return [row for row in rows_in(path.read_bytes()) if row["step"] <= until]


def scalars(row: Row) -> dict[str, float]:
    """Return the known values of a row, by SPLIT/METRIC."""
    known = {name: value for name, value in row.items() if name not in ("step", "split") and value is not None}
    return {f"{row['split']}/{name}": value for name, value in known.items()}


def numbers_of(row: Row) -> Row:
    """Return a row without its lists of numbers, which only the file has."""
    return {name: value for name, value in row.items() if not isinstance(value, list)}


def rows_in(content: bytes) -> list[Row]:
    """Return the rows among the lines of `content`, their numbers only."""
    return [numbers_of(row) for row in _whole_rows(content)]


def _whole_rows(content: bytes) -> list[Row]:
    rows = []
    for line in content.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            if _is_row(row := json.loads(line)):
                rows.append(row)
    return rows


def _is_row(row: Any) -> bool:
    if not (isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("split"), str)):
        return False
    return all(value is None or isinstance(value, (int, float, list)) for name, value in row.items() if name != "split")


def write_rows(path: Path, rows: list[Row]) -> None:
    """Replace a `metrics.jsonl` by these rows."""
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
