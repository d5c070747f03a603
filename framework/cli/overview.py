"""mode=report and mode=status: all runs below run.root, or of a sweep. They start nothing, change no run, import no torch."""

import csv
from pathlib import Path
from typing import Any

from framework.config.compose import parse
from framework.config.validation import schema_problems
from framework.launch.claim import report
from framework.runs import status
from framework.runs.directory import RunDirectory
from framework.runs.report import find_runs, printable, read_runs, told
from framework.runtime.exits import Exit
from framework.runtime.log import LOGGER
from framework.runtime.problem import Problem

_USED = ("mode", "run.root")


def over_root(config: dict[str, Any], overrides: list[str], problems: list[Problem]) -> Exit:
    """Do what `mode` says. `problems` are those of composing `config`. Returns the exit code."""
    given = [parsed.key_or_group for parsed in map(parse, overrides) if parsed is not None]
    unused = [
        Problem(key, f"does nothing with mode={config['mode']}", "run.root alone") for key in given if key not in _USED
    ]
    if problems := (problems + schema_problems(config)) or unused:
        return report(problems)
    root = Path(config["run"]["root"])
    return MODES[config["mode"]](root)


def _make_report(root: Path) -> Exit:
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
    LOGGER.info("%s: %s", told(runs), target)
    return Exit.FINISHED


def _tell_status(root: Path) -> Exit:
    """Print a table, a run a line."""
    try:
        found = _of_sweep(root / "sweep.csv") or {path: str(path.relative_to(root)) for path in find_runs(root)}
    except (OSError, ValueError, csv.Error) as error:
        return report(
            [
                Problem(
                    "run.root",
                    f"{printable(str(root))}/sweep.csv cannot be read ({error})",
                    "the sweep's command writes it anew",
                )
            ]
        )
    if not found:
        return _no_run(root)
    status.tell(status.read_all([RunDirectory(path) for path in found]), list(found.values()))
    return Exit.FINISHED


def _of_sweep(table: Path) -> dict[Path, str]:
    """Return the runs of a sweep, each with its values of what is swept; none if there is no table. ValueError if it is damaged."""
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
    return report([Problem("run.root", f"{printable(str(root))} has no run", "a directory that runs live in")])


MODES = {"report": _make_report, "status": _tell_status}
