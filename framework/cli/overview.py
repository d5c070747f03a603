"""The modes that show the state of runs: plan, status and report. They start nothing and change no run."""

import csv
from pathlib import Path

from framework.config.compose import Composed
from framework.config.modes import Command, Mode
from framework.config.targets import locate
from framework.config.validation import validate
from framework.launch.decision import print_problems
from framework.runs.directory import RunDirectory
from framework.runs.report import RunReader, count_states, find_runs, printable, write_page
from framework.runs.status import print_table
from framework.runs.table import TableRow, listing
from framework.runtime.exits import Exit
from framework.runtime.forks import comes_true
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem


def over_root(line: list[str], composed: Composed, mode: Mode) -> int:
    """Run a mode for all runs below run.root. Return the exit code."""
    draft = validate(composed)
    if not draft.problems:
        expected = " and ".join(mode.may_give[1:]) + " alone"
        ignored = [key for key in composed.given if key not in mode.may_give]
        draft.add(Problem(key, f"does nothing with mode={mode.name}", expected) for key in ignored)
    config = draft.config
    return print_problems(draft.problems) if config is None else locate(mode.parent)(Command(line, config))


def print_plan(command: Command) -> Exit:
    """Print the state of one run."""
    values = dict(override.partition("=")[::2] for override in command.line)
    row = TableRow.read(command.config.run, values)
    print(listing([row]), end="")
    return Exit.FINISHED


def make_report(command: Command) -> Exit:
    """Write `report.html`. With report.every_s, write it repeatedly until Ctrl-C, then once more without reloading."""
    root, every_s = Path(command.config.run.root), command.config.report.every_s
    reader = RunReader(root)
    PREEMPTION.speaks = False
    code = _write_report(reader, root, every_s=every_s)
    if code != Exit.FINISHED or every_s is None:
        return code
    while code == Exit.FINISHED and not comes_true(lambda: PREEMPTION.requested, within_s=every_s):
        code = _write_report(reader, root, every_s=every_s, is_quiet=True)
    return _write_report(reader, root, every_s=None)


def _write_report(reader: RunReader, root: Path, *, every_s: float | None, is_quiet: bool = False) -> Exit:
    runs, left_out = reader.read()
    for line in [] if is_quiet else left_out:
        LOGGER.warning("left out: %s", line)
    if not runs:
        return _no_run(root)
    target = root / "report.html"
    try:
        write_page(runs, left_out, target, title=f"Runs below {printable(str(root))}", every_s=every_s)
    except OSError as error:
        LOGGER.error("%s could not be written: %s", target, error.strerror)
        return Exit.DISK
    if not is_quiet:
        until = f", every {every_s:g} s until Ctrl-C" if every_s else ""
        LOGGER.info("%s: %s%s", count_states([run.state for run in runs]), target, until)
    return Exit.FINISHED


def print_status(command: Command) -> Exit:
    """Print a table with one line per run."""
    root = Path(command.config.run.root)
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
    """Return the runs of a sweep, each with its values of the swept keys. Raise ValueError if the table is damaged."""
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
    return print_problems([Problem("run.root", f"{printable(str(root))} has no run", "a directory that contains runs")])
