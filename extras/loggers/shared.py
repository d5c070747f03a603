"""What several loggers share."""

import csv
import shutil
from pathlib import Path
from typing import NamedTuple

from framework.loggers.sink import RunInfo
from framework.runs.metrics_file import Row


def folder_of_runs(run: RunInfo) -> Path:
    """Return the folder of all runs, or the run's own folder if `run.dir` is in another place."""
    path = run.directory.resolve()
    return path.parents[1] if path.name == run.run_id else path


def unique_name(run: RunInfo) -> str:
    """Return a name that no other record has: the same after an interruption."""
    return f"{run.name}/{run.record_id}"


def empty_folder(run: RunInfo, name: str) -> Path:
    """Return an empty folder for the files of a logger. Each start of a run writes all rows into it."""
    folder = run.directory.resolve() / "loggers" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def read_table(path: Path) -> list[list[str]]:
    """Return the lines of a table that a part has logged; the first has the names of the columns."""
    with open(path, newline="") as file:
        return list(csv.reader(file))


class Histogram(NamedTuple):
    """How many of a tensor's values lie in each of equal bins between `lowest` and `highest`."""

    lowest: float
    highest: float
    counts: list[int]

    @property
    def edges(self) -> list[float]:
        """The limits of the bins: one more than the number of bins."""
        width = (self.highest - self.lowest) / len(self.counts)
        return [self.lowest + width * number for number in range(len(self.counts))] + [self.highest]


def histograms(row: Row) -> dict[str, Histogram]:
    """Return a row's histograms (from extras/parts/histograms.py), as `weights/NAME` and `gradients/NAME`."""
    return {f"{name.partition('_')[0]}s/{name.partition(':')[2]}": Histogram(*value) for name, value in row.items()
            if name.startswith(("weight_histogram:", "gradient_histogram:"))}  # fmt: skip
