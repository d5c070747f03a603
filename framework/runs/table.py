"""The states of runs, one row per run: the list of mode=plan, and the table of a sweep."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.schema import RunSection
from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import best_of_monitor, is_curve
from framework.runtime.exits import Exit
from framework.runtime.files import write_atomically


@dataclass(frozen=True)
class TableRow:
    """The state of one job."""

    run_id: str
    directory: RunDirectory
    values: dict[str, str]  # of the swept keys, in command-line form
    state: str
    objective: float | None  # the best value of checkpoint.monitor until now
    error: str  # why the job failed
    code: int | None  # the exit code, if the job has just run

    @classmethod
    def read(cls, run: RunSection, values: dict[str, str], *, state: str | None = None, code: int | None = None) -> "TableRow":
        """Read the state of the job from its directory.

        `state` is a state that a search knows better than the directory. `code` is the exit code of a job that has just ended.
        """
        directory = RunDirectory(Path(run.dir))
        summary = directory.read_summary()
        objective, _ = best_of_monitor(summary)
        state = "failed" if code not in (None, Exit.FINISHED, Exit.PREEMPTED) else state or directory.state
        how = "refused before its start" if code == Exit.CONFIGURATION else "without a message"
        error = summary.get("error") or f"{directory.state if code is None else f'exit {code}'}, {how}"
        return cls(run.id, directory, values, state, objective, str(error) if state == "failed" else "", code)

    @property
    def assignment(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())


def listing(rows: list[TableRow]) -> str:
    """Return the output of mode=plan: a line for each job, with its id, its state and its own overrides."""
    return "".join(f"{row.run_id}  {row.state:<9}  {row.assignment}{f'  ({row.error})' if row.error else ''}".rstrip() + "\n"
                   for row in rows)  # fmt: skip


def write_csv(rows: list[TableRow], target: Path) -> None:
    """Write the table atomically."""
    dicts: list[dict[str, Any]] = []
    for row in rows:
        summary = row.directory.read_summary()
        last = {f"{split}/{name}": value for split, metrics in summary.get("metrics", {}).items()
                for name, value in metrics.get("last", {}).items() if is_curve(name)}  # fmt: skip
        ends = {"step": summary.get("step"), "seconds": summary.get("wall_s"), "error": " ".join(row.error.split())}
        first = {"id": row.run_id, "directory": row.directory.path, "state": row.state, **row.values}
        dicts.append({**first, "objective": row.objective, **last, **ends})
    at_the_end = ("step", "seconds", "error")
    columns = dict.fromkeys(name for row in dicts for name in row if name not in at_the_end)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, *at_the_end], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dicts)
    write_atomically(target, text.getvalue())


def best_of(rows: list[TableRow], *, mode: str) -> TableRow | None:
    """Return the finished job with the best objective."""
    done = [row for row in rows if row.state == "finished" and row.objective is not None]
    return (max if mode == "max" else min)(done, key=lambda row: row.objective or 0.0, default=None)
