"""How runs stand, a row each: what mode=plan lists and a sweep's table holds."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.schema import RunSection
from framework.runs.curves import NOT_CURVES
from framework.runs.directory import RunDirectory
from framework.runtime.exits import Exit
from framework.runtime.files import write_atomically


@dataclass(frozen=True)
class TableRow:
    """How one job stands."""

    run_id: str
    directory: RunDirectory
    values: dict[str, str]  # of the swept keys, as a command line writes them
    state: str
    objective: float | None  # the best value of checkpoint.monitor so far
    error: str  # why it failed
    code: int | None  # the exit code, if it has run now

    @classmethod
    def read(
        cls, run: RunSection, monitor: str, values: dict[str, str], *, state: str | None = None, code: int | None = None
    ) -> "TableRow":
        """Read from the job's directory how it stands.

        `state` is what a search knows better; `code` the exit code, of one that has just ended.
        """
        directory = RunDirectory(Path(run.dir))
        summary = directory.read_summary()
        split, _, metric = monitor.partition("/")
        objective = summary.get("metrics", {}).get(split, {}).get("best", {}).get(metric)
        state = "failed" if code not in (None, Exit.FINISHED, Exit.PREEMPTED) else state or directory.state
        error = summary.get("error") or ("" if code is None else f"exit {code}, without a word")
        return cls(run.id, directory, values, state, objective, str(error) if state == "failed" else "", code)

    @property
    def assignment(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())

    def as_dict(self) -> dict[str, Any]:
        summary = self.directory.read_summary()
        last = {f"{split}/{name}": value for split, rows in summary.get("metrics", {}).items()
                for name, value in rows.get("last", {}).items() if name not in NOT_CURVES}  # fmt: skip
        return {"id": self.run_id, "directory": self.directory.path, "state": self.state, **self.values,
                "objective": self.objective, **last, "step": summary.get("step"), "seconds": summary.get("wall_s"),
                "error": " ".join(self.error.split())}  # fmt: skip


def listing(rows: list[TableRow]) -> str:
    """Return what mode=plan prints: a line a job, with its id, its state and its own overrides."""
    return "".join(f"{row.run_id}  {row.state:<9}  {row.assignment}{f'  ({row.error})' if row.error else ''}".rstrip() + "\n"
                   for row in rows)  # fmt: skip


def write_csv(rows: list[TableRow], target: Path) -> None:
    """Write the table, whole or not at all."""
    dicts = [row.as_dict() for row in rows]
    ends = ("step", "seconds", "error")
    columns = dict.fromkeys(name for row in dicts for name in row if name not in ends)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, *ends], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dicts)
    write_atomically(target, text.getvalue())


def best_of(rows: list[TableRow], *, mode: str) -> TableRow | None:
    """Return the finished job with the best objective."""
    done = [row for row in rows if row.state == "finished" and row.objective is not None]
    return (max if mode == "max" else min)(done, key=lambda row: row.objective or 0.0, default=None)
