"""What several loggers share."""

import csv
import shutil
from pathlib import Path

from framework.loggers.sink import RunInfo


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
