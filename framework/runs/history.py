"""The extract of a metrics file for a picture: curves with a screen's resolution, best and last values."""

import math
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from framework.runs.metrics_file import TRAIN_ROW, is_curve, is_maximised, number, row_in


@dataclass(slots=True)
class Series:
    """One metric of one split over the steps of a run: SPLIT/METRIC."""

    maximised: bool
    last: float = math.nan  # nan: the value in the last row is not finite
    best: float = math.nan
    best_step: int = 0
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float, *, is_kept: bool) -> None:
        self.last = value
        if not math.isfinite(value):
            return
        if not (value <= self.best if self.maximised else value >= self.best):  # true for the first value: best is nan then
            self.best, self.best_step = value, step
        if is_kept:
            self.steps.append(step)
            self.values.append(value)


def read_history(path: Path, *, monitor: str, mode: str, most: int, aside: Container[str]) -> dict[str, Series]:
    """Read a `metrics.jsonl`. Skip damaged lines. `monitor` and `mode` are the keys of `checkpoint`.

    A training curve has at most `most` points. `aside` are columns that are no curves of a metric, but belong to the picture.
    """
    with open(path, "rb") as file:
        num_train = sum(TRAIN_ROW in line for line in file)
        every = 1
        while num_train > most * every:
            every *= 2  # a power of two: so runs of different length have common steps
        file.seek(0)
        found: dict[str, Series] = {}
        of_rows: dict[tuple[str, ...], list[tuple[str, Series]]] = {}  # key: the split and the names of a row
        seen = 0
        for line in file:
            seen += (is_train := TRAIN_ROW in line)
            if (row := row_in(line)) is None or not math.isfinite(number(row["step"])):
                continue
            kind = (row["split"], *row)
            if kind not in of_rows:
                of_rows[kind] = []
                for name in (name for name in row if is_curve(name) or name in aside):
                    key = f"{row['split']}/{name}"
                    series = found.setdefault(key, Series(is_maximised(key, monitor=monitor, mode=mode)))
                    of_rows[kind].append((name, series))
            for name, series in of_rows[kind]:
                series.add(row["step"], number(row[name]), is_kept=not is_train or seen % every == 0 or seen == num_train)
    return found
