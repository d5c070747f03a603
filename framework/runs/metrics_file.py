"""The rows of `metrics.jsonl`, which are a run's measurements."""

import contextlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from framework.runtime.files import flush_to_disk, replacing, tail
from framework.runtime.log import LOGGER

Row = dict[str, Any]  # numbers by name; a row of a file may also have lists of numbers

# Values from a clock or from the machine. They differ each time, and between ways to execute a run.
MACHINE = (
    "samples_per_s", "tokens_per_s", "step_s", "data_s", "data_share", "forward_backward_s", "optimizer_s", "checkpoint_s",
    "mfu", "memory_gib", "goodput", "cpu_cores", "resident_gib", "gpu_use", "gpu_memory_gib", "disk_free_gib",
)  # fmt: skip
NOT_CURVES = ("step", "split", "epoch", "lr", "grad_norm", *MACHINE)
MAXIMISED = ("accuracy", "top5")  # known metrics for which a larger value is better


def is_maximised(name: str, *, monitor: str, mode: str) -> bool:
    """Return whether a larger value of SPLIT/METRIC is better. For the monitored metric, the configuration decides."""
    return mode == "max" if name == monitor else name.partition("/")[2] in MAXIMISED


def is_curve(name: str) -> bool:
    """Return whether a column is drawn, printed on a terminal and listed. Positions (step, ...) and NAME:MODULE are not."""
    return name not in NOT_CURVES and ":" not in name


def in_digits(value: float | None) -> str:
    """Return a number as text with four decimals, or as a power of ten if four decimals would show nothing.

    A row has None for a value that is not finite.
    """
    if value is None:
        return "nan"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def number(value: Any) -> float:
    """Return a file's value as a number. Return nan if it is not a number, or too large for a float."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan


def best_of_monitor(summary: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the best value of checkpoint.monitor in a run's summary, and its step. None: there is none yet."""
    split, _, metric = str(summary.get("monitor")).partition("/")
    row = summary.get("metrics", {}).get(split, {}).get("best", {})
    return row.get(metric), row.get("step")


class Mark(NamedTuple):
    """A mark of the content of a metrics file at a checkpoint."""

    num_rows: int  # without test rows: a run that continues from this run does not get them
    num_bytes: int
    crc32: int

    def after(self, row: Row, line: bytes) -> "Mark":
        """Return the mark after one more row."""
        num_rows = self.num_rows + (row["split"] != "test")
        return Mark(num_rows, self.num_bytes + len(line), zlib.crc32(line, self.crc32))

    def fits(self, path: Path) -> bool:
        """Return whether a file begins with the content that the mark describes."""
        left, crc32 = self.num_bytes, 0
        with contextlib.suppress(OSError), open(path, "rb") as file:
            while left and (part := file.read(min(left, _READ_BYTES))):
                left, crc32 = left - len(part), zlib.crc32(part, crc32)
            return left == 0 and crc32 == self.crc32
        return False


_NOTHING = Mark(0, 0, 0)
_READ_BYTES = 1 << 20


class MetricsFile:
    """`metrics.jsonl`: one row per line, each step once. Rank 0 only. `mark` describes its content."""

    def __init__(self, path: Path, *, step: int, mark: Mark | None = None) -> None:
        """Open the file for appending. First remove the rows after `step`, where the run continues, and all duplicates.

        `mark` belongs to the checkpoint of this step. A file that begins with the mark's content is cut there, whatever its
        size. In any other file each row is read, and a warning reports missing rows.
        """
        self.mark = _NOTHING
        if mark is not None and mark.fits(path):
            os.truncate(path, mark.num_bytes)
            self.mark = mark
        elif path.exists():
            rows = {(row["step"], row["split"]): row for row in iterate_rows(path, until=step)}
            write_rows(path, rows.values())
            for row in rows.values():
                self.mark = self.mark.after(row, _line(row))
            if mark is not None and self.mark.num_rows < mark.num_rows:
                lost = mark.num_rows - self.mark.num_rows
                LOGGER.warning("%s has lost %d of the %d rows before step %d", path, lost, mark.num_rows, step + 1)
        elif step:
            LOGGER.warning("%s is gone: the rows before step %d are lost", path, step)
        self._file = open(path, "ab", buffering=0)
        flush_to_disk(path.parent)
        self._unwritten = bytearray()

    def log(self, row: Row) -> None:
        """Write a row. If the disk is full, keep the row, and write it with the next row."""
        line = _line(row)
        self.mark = self.mark.after(row, line)
        self._unwritten += line
        with contextlib.suppress(OSError):  # `flush` raises this error
            self._write()

    def _write(self) -> None:
        while self._unwritten:
            del self._unwritten[: self._file.write(self._unwritten)]

    def flush(self) -> None:
        """Flush the rows to the disk, before the commit of a checkpoint that needs them. Raise OSError if it fails."""
        self._write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a `metrics.jsonl`, in order, without their lists of numbers."""
    return [numbers_of(row) for row in iterate_rows(path)]


def iterate_rows(path: Path, *, until: float = math.inf) -> Iterator[Row]:
    """Yield the rows of a `metrics.jsonl` until a step with their lists of numbers. Nothing, if there is no file."""
    if path.is_file():
        with open(path, "rb") as file:
            yield from (row for row in rows_in(file) if row["step"] <= until)


TRAIN_ROW = b'"split": "train"'


def scalars(row: Row) -> dict[str, float]:
    """Return the numbers of a row that are not null, by SPLIT/METRIC."""
    known = {name: value for name, value in numbers_of(row).items() if name not in ("step", "split") and value is not None}
    return {f"{row['split']}/{name}": value for name, value in known.items()}


def numbers_of(row: Row) -> Row:
    """Return a row without its lists of numbers. Only the file has these lists."""
    return {name: value for name, value in row.items() if not isinstance(value, list)}


def last_rows(path: Path) -> list[Row]:
    """Return some hundred rows from the end of a file, or [] if the file cannot be read."""
    with contextlib.suppress(OSError):
        return [*rows_in(tail(path, num_bytes=1 << 16).splitlines())]
    return []


def rows_in(lines: Iterable[bytes]) -> Iterator[Row]:
    """Yield the rows in lines. Skip damaged lines (a crash may cut one)."""
    return (row for row in map(row_in, lines) if row is not None)


_KINDS = {str, int, float, bool, list, type(None)}


def row_in(line: bytes) -> Row | None:
    """Return the complete row in a line, or None for a damaged line."""
    try:
        row = json.loads(line.decode())  # for bytes, json would search for the encoding
    except (ValueError, RecursionError):
        return None
    if not (isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("split"), str)):
        return None
    kinds = [type(value) for value in row.values()]
    return row if kinds.count(str) == 1 and _KINDS.issuperset(kinds) else None  # the split is the only text


def _line(row: Row) -> bytes:
    return (json.dumps(row) + "\n").encode()


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace a `metrics.jsonl` by a file with these rows."""
    with replacing(path) as new, open(new, "wb") as file:
        file.writelines(map(_line, rows))
