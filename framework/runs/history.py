"""The report's extract of a metrics file: curves with a screen's resolution, best and last values, and marks.

Marks serve to compare two files. The lines are read in one pass, so that a long file needs no memory.
"""

import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from framework.runs.metrics_file import MACHINE, TRAIN_ROW, Row, is_curve, is_maximised, row_in

_MOST_POINTS = 300  # per training curve: a screen cannot show more
_MOST_MARKS = 256
_MACHINE_VALUES = re.compile(rb', "(?:%s)": [^,}]+' % "|".join(MACHINE).encode())

Curve = tuple[list[float], list[float]]  # steps and values


class Series:
    """One metric of one split over the steps of a run."""

    __slots__ = ("best", "best_step", "is_drawn", "last", "maximised", "steps", "values")

    def __init__(self, *, maximised: bool, is_drawn: bool) -> None:
        self.maximised, self.is_drawn = maximised, is_drawn  # only a drawn series keeps a curve
        self.last = self.best = self.best_step = math.nan
        self.steps: list[float] = []
        self.values: list[float] = []

    def add(self, step: float, value: float, *, is_kept: bool) -> None:
        self.last = value
        if not math.isfinite(value):
            return
        if not (value <= self.best if self.maximised else value >= self.best):  # true for the first value: best is nan then
            self.best, self.best_step = value, step
        if is_kept and self.is_drawn:
            self.steps.append(step)
            self.values.append(value)


@dataclass
class History:
    """The extract of a file's rows."""

    series: dict[tuple[str, str], Series] = field(default_factory=dict)  # keys: split and metric
    clock: Curve = field(default_factory=lambda: ([], []))  # steps, and the seconds of training until each step
    marks: list[tuple[float, int]] = field(default_factory=list)  # step, and the CRC-32 of all rows until it, without MACHINE
    num_rows: int = 0
    stride: int = 1  # marks are at the rows 1 * stride, 2 * stride, ..., and at the last row


def read_history(path: Path, *, monitor: str, mode: str) -> History:
    """Read a `metrics.jsonl`. Skip damaged lines. `monitor` and `mode` are the keys of `checkpoint`."""
    with open(path, "rb") as file:
        num_lines = num_train = 0
        for line in file:
            num_lines += 1
            num_train += TRAIN_ROW in line
        file.seek(0)
        return _history(file, num_lines=num_lines, num_train=num_train, monitor=monitor, mode=mode)


def _history(lines: Iterable[bytes], *, num_lines: int, num_train: int, monitor: str, mode: str) -> History:
    history, found = History(), _Found(monitor, mode)
    every = -(-num_train // _MOST_POINTS) or 1
    while num_lines > _MOST_MARKS * history.stride:
        history.stride *= 2  # a power of two: so each mark of a long file is also a mark of a shorter file
    seen = crc = 0
    step = seconds = before = 0.0
    for line in lines:
        seen += (is_train := TRAIN_ROW in line)
        if (row := row_in(line)) is None or not math.isfinite(at := number(row["step"])):
            continue
        step, is_kept = at, not is_train or (num_train - seen) % every == 0
        crc = zlib.crc32(_MACHINE_VALUES.sub(b"", line), crc)
        history.num_rows += 1
        if history.num_rows % history.stride == 0:
            history.marks.append((step, crc))
        found.add(row, step=step, is_kept=is_kept)
        if is_train and (spent := number(row.get("step_s"))) >= 0:
            seconds, before = seconds + spent * (step - before), step
            if is_kept:
                history.clock[0].append(step)
                history.clock[1].append(seconds)
    if history.num_rows % history.stride:
        history.marks.append((step, crc))
    history.series = found.series
    return history


class _Found:
    """The series of the rows that have been read."""

    def __init__(self, monitor: str, mode: str) -> None:
        self._monitor, self._mode = monitor, mode
        self.series: dict[tuple[str, str], Series] = {}
        self._shown: dict[tuple[str, ...], list[tuple[str, Series]]] = {}  # key: the split and the names of a row

    def add(self, row: Row, *, step: float, is_kept: bool) -> None:
        kind = (row["split"], *row)
        if kind not in self._shown:
            self._shown[kind] = [(name, self._series(row["split"], name)) for name in row if _is_shown(name)]
        for name, series in self._shown[kind]:
            series.add(step, number(row[name]), is_kept=is_kept)

    def _series(self, split: str, name: str) -> Series:
        maximised = is_maximised(f"{split}/{name}", monitor=self._monitor, mode=self._mode)
        return self.series.setdefault((split, name), Series(maximised=maximised, is_drawn=is_curve(name)))


def _is_shown(name: str) -> bool:
    return is_curve(name) or name == "samples_per_s"


def number(value: Any) -> float:
    """Return a file's value as a number. Return nan if it is not a number, or too large for a float."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan
