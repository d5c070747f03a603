"""The rows of `metrics.jsonl`: what a run measured."""

import contextlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from framework.runtime.files import flush_directory, replacing
from framework.runtime.log import LOGGER

Row = dict[str, Any]  # numbers by name; the rows of a file may have lists of numbers too

# Values that a clock or the machine has measured: they differ each time, and between ways to execute a run.
MACHINE = (
    "samples_per_s", "tokens_per_s", "step_s", "data_s", "data_share", "forward_backward_s", "optimizer_s", "checkpoint_s",
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


class Mark(NamedTuple):
    """What a metrics file held at a checkpoint."""

    num_rows: int  # but the tests': a run that begins with this one does not take them over
    num_bytes: int
    crc32: int

    def after(self, row: Row, line: bytes) -> "Mark":
        """Return the mark after one more row."""
        num_rows = self.num_rows + (row["split"] != "test")
        return Mark(num_rows, self.num_bytes + len(line), zlib.crc32(line, self.crc32))

    def fits(self, path: Path) -> bool:
        """Return whether a file begins with what the mark tells of."""
        left, crc32 = self.num_bytes, 0
        with contextlib.suppress(OSError), open(path, "rb") as file:
            while left and (part := file.read(min(left, _READ_BYTES))):
                left, crc32 = left - len(part), zlib.crc32(part, crc32)
            return left == 0 and crc32 == self.crc32
        return False


_NOTHING = Mark(0, 0, 0)
_READ_BYTES, _TAIL_BYTES = 1 << 20, 1 << 16


class MetricsFile:
    """`metrics.jsonl`: one row a line, each step once. Rank 0 only. `mark` tells what it holds."""

    def __init__(self, path: Path, *, step: int, mark: Mark | None = None) -> None:
        """Open for appending. Rows after `step`, where the run continues, are removed first, and all but one of a step's.

        `mark`: of the checkpoint of that step. A file that begins so is cut there, whatever its size; of any other each row
        is read, and fewer rows are warned of.
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
        flush_directory(path.parent)
        self._unwritten = bytearray()

    def log(self, row: Row) -> None:
        """Write a row. A row that a full disk does not take is kept, and written with the next row."""
        line = _line(row)
        self.mark = self.mark.after(row, line)
        self._unwritten += line
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
    return [numbers_of(row) for row in iterate_rows(path, until=until)]


def iterate_rows(path: Path, *, until: float = math.inf) -> Iterator[Row]:
    """Yield the same one after the other, whole: with their lists of numbers."""
    with open(path, "rb") as file:
        yield from (row for row in _whole_rows(file) if row["step"] <= until)


TRAIN_ROW = b'"split": "train"'


def sampled_rows(path: Path, *, most: int) -> list[Row]:
    """Return the rows, of the training rows no more than a curve shows: the last, and some before it at equal distances."""
    with open(path, "rb") as file:
        num_train = sum(TRAIN_ROW in line for line in file)
        every, number, lines = -(-num_train // most) or 1, 0, []
        file.seek(0)
        for line in file:
            number += (is_train := TRAIN_ROW in line)
            if not is_train or (num_train - number) % every == 0:
                lines.append(line)
    return [numbers_of(row) for row in _whole_rows(lines)]


class Histogram(NamedTuple):
    """How often a tensor's values lie in each of equal bins between `lowest` and `highest`."""

    lowest: float
    highest: float
    counts: list[int]

    @property
    def edges(self) -> list[float]:
        """The bins' limits, one more than there are bins."""
        width = (self.highest - self.lowest) / len(self.counts)
        return [self.lowest + width * number for number in range(len(self.counts))] + [self.highest]


def histograms(row: Row) -> dict[str, Histogram]:
    """Return a row's histograms (of framework/parts/histograms.py), as `weights/NAME` and `gradients/NAME`."""
    return {f"{name.partition('_')[0]}s/{name.partition(':')[2]}": Histogram(*value) for name, value in row.items()
            if name.startswith(("weight_histogram:", "gradient_histogram:"))}  # fmt: skip


def scalars(row: Row) -> dict[str, float]:
    """Return the known numbers of a row, by SPLIT/METRIC."""
    known = {name: value for name, value in numbers_of(row).items() if name not in ("step", "split") and value is not None}
    return {f"{row['split']}/{name}": value for name, value in known.items()}


def numbers_of(row: Row) -> Row:
    """Return a row without its lists of numbers, which only the file has."""
    return {name: value for name, value in row.items() if not isinstance(value, list)}


def last_rows(path: Path) -> list[Row]:
    """Return some hundred rows at the end of a file; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return rows_in(file.read())
    except OSError:
        return []


def rows_in(content: bytes) -> list[Row]:
    """Return the rows among the lines of `content`, their numbers only."""
    return [numbers_of(row) for row in _whole_rows(content.splitlines())]


_KINDS = {str, int, float, bool, list, type(None)}


def row_in(line: bytes) -> Row | None:
    """Return the row that a line holds, whole; None for a damaged line."""
    try:
        row = json.loads(line.decode())  # of bytes it would look for the encoding
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def _whole_rows(lines: Iterable[bytes]) -> Iterator[Row]:
    return (row for row in map(row_in, lines) if row is not None)


def _line(row: Row) -> bytes:
    return (json.dumps(row) + "\n").encode()


def _is_row(row: Any) -> bool:
    if not (isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("split"), str)):
        return False
    kinds = [type(value) for value in row.values()]
    return kinds.count(str) == 1 and _KINDS.issuperset(kinds)  # the split's is the one text


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace a `metrics.jsonl` by these rows."""
    with replacing(path) as new, open(new, "wb") as file:
        file.writelines(map(_line, rows))
