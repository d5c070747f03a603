"""The modes that show the state of runs: plan, status and report. They start nothing and change no run."""

import csv
from pathlib import Path

from framework.config.compose import Composed
from framework.config.modes import Command, Mode
from framework.config.targets import locate
from framework.config.validation import validate
from framework.launch.claim import print_problems
from framework.runs.directory import RunDirectory
from framework.runs.report import count_states, find_runs, printable, read_runs
from framework.runs.status_table import print_table
from framework.runs.table import TableRow, listing
from framework.runtime.exits import Exit
from framework.runtime.log import LOGGER
from framework.runtime.problem import Problem, missing_extra

_USED = ("mode", "run.root")


def over_root(composed: Composed, mode: Mode) -> int:
    """Run a mode that is about all runs below run.root. Returns the exit code."""
    draft = validate(composed)
    if not draft.problems:
        ignored = [key for key in composed.given if key not in _USED]
        draft.add(Problem(key, f"does nothing with mode={mode.name}", "run.root alone") for key in ignored)
    draft.add(missing_extra("mode", mode.extra) if mode.extra else [])
    config = draft.config
    return print_problems(draft.problems) if config is None else locate(mode.parent)(Path(config.run.root))


def print_plan(command: Command) -> Exit:
    """Print the state of one run."""
    values = dict(override.partition("=")[::2] for override in command.line)
    row = TableRow.read(command.config.run, command.config.checkpoint.monitor, values)
    print(listing([row]), end="")
    return Exit.FINISHED


def make_report(root: Path) -> Exit:
    """Write `report.html`."""
    runs, left_out = read_runs(root)
    for line in left_out:
        LOGGER.warning("left out: %s", line)
    if not runs:
        return _no_run(root)
    from framework.runs.report_page import write_page  # bokeh takes most of a second

    target = root / "report.html"
    try:
        write_page(runs, left_out, target, title=f"Runs below {printable(str(root))}")
    except OSError as error:
        LOGGER.error("%s could not be written: %s", target, error.strerror)
        return Exit.DISK
    LOGGER.info("%s: %s", count_states([run.state for run in runs]), target)
    return Exit.FINISHED


def print_status(root: Path) -> Exit:
    """Print a table, a line for each run."""
    try:
        of_sweep = _of_sweep(root / "sweep.csv")
        found = list(of_sweep) or find_runs(root)
    except (OSError, ValueError, csv.Error) as error:
        what = f"{printable(str(root))}/sweep.csv cannot be read ({error})"
        return print_problems([Problem("run.root", what, "the sweep's command writes it again")])
    if not found:
        return _no_run(root)
    print_table([RunDirectory(path) for path in found], root=root, values=list(of_sweep.values()) or None)
    return Exit.FINISHED


def _of_sweep(table: Path) -> dict[Path, str]:
    """Return the runs of a sweep, each with its values of the swept keys. ValueError if the table is damaged."""
    if not table.exists():
        return {}
    if not table.is_file():
        raise ValueError("not a plain file")
    with open(table, newline="", errors="replace") as file:
        rows = list(csv.DictReader(file))
    columns = list(rows[0]) if rows else []
    whole = all(isinstance(value, str) and value.isprintable() for row in rows for value in row.values())
    if not whole or not {"directory", "state", "objective"} <= set(columns):
        raise ValueError("not a sweep's table")
    swept = columns[columns.index("state") + 1 : columns.index("objective")]
    return {Path(row["directory"]): " ".join(f"{key}={row[key]}" for key in swept) for row in rows}


def _no_run(root: Path) -> Exit:
    return print_problems([Problem("run.root", f"{printable(str(root))} has no run", "a directory that runs live in")])
