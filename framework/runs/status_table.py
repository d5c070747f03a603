"""The table of mode=status: one line per run, as wide as the terminal. Cells that do not fit are shown below their run."""

import math
import sys
import textwrap
from collections.abc import Container, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from framework.runs.differences import differences
from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import Row, last_rows
from framework.runs.report import count_states, name_below, number, printable
from framework.runs.status import Standing, standings
from framework.runtime.lock import Lock

if TYPE_CHECKING:
    from rich.text import Text

_LONGEST_S = 1e9
_STYLES = {"finished": "green", "failed": "red", "killed": "red", "running": "cyan", "queued": "yellow", "preempted": "yellow",
           "cancelled": "yellow", "?": "magenta"}  # fmt: skip
_COLUMNS = ("run", "state", "step", "ETA", "metric", "differs", "job", "node", "why")
_INDENT = "    "  # the indent of lines below a run

Cells = dict[str, str]  # of a run, by column


def print_table(
    directories: Sequence[RunDirectory], *, root: Path, values: Sequence[str] | None = None, pruned: Container[Path] = ()
) -> None:
    """Print a line for each run below `root`, and the number of runs. Nothing is cut: run.dir accepts the text in `run`.

    `values` describe how each run differs from the others of its sweep. With None, the configurations are compared. `pruned`
    are the runs that a search has ended.
    """
    from rich.console import Console
    from rich.text import Text

    odd = {directory.path: files for directory in directories if (files := directory.odd_files())}
    sound = [directory for directory in directories if directory.path not in odd]
    found = standings(sound)
    found |= {path: standing._replace(state="pruned") for path, standing in found.items() if path in pruned}
    if values is None:
        by_path = differences(directory.path for directory in sound)
        values = [by_path.get(directory.path, "") for directory in directories]
    rows = list[Cells]()
    for directory, differs in zip(directories, values):
        cells = {"run": _below(directory.path, root), "differs": differs}
        if path_odd := odd.get(directory.path):
            cells |= {"state": "unreadable", "why": f"{path_odd[0]} is not a plain file"}
        else:
            cells |= _cells(directory, found[directory.path])
        rows.append({name: printable(text) for name, text in cells.items()})
    console = Console(file=sys.stdout, highlight=False)
    width = console.width if sys.stdout.isatty() else math.inf  # in a file, no line is folded
    line = "-" if console.options.ascii_only else "─"
    for text, state in [*_lines(rows, width=width, line=line), (count_states([row["state"] for row in rows]), "")]:
        console.print(_coloured(Text(text), state), soft_wrap=True)


def _lines(rows: Sequence[Cells], *, width: float, line: str) -> list[tuple[str, str]]:
    """Return the table's lines. The line of a run has the run's state; other lines have an empty state."""
    from rich.cells import cell_len, set_cell_size

    sizes = {name: max(map(cell_len, (name, *(row.get(name, "") for row in rows)))) for name in _COLUMNS
             if any(row.get(name) for row in rows)}  # fmt: skip
    shown, left = list[str](), width + 2  # + 2: the last column needs no gap
    for name, size in sizes.items():
        left -= size + 2
        shown += [name] if left >= 0 or len(shown) < 2 else []
        left += 0 if name in shown else size + 2

    def joined(cells: Mapping[str, str]) -> str:
        return "  ".join(set_cell_size(cells.get(name, ""), sizes[name]) for name in shown).rstrip()

    lines = [(joined({name: name for name in shown}), ""), (line * (sum(sizes[name] + 2 for name in shown) - 2), "")]
    for row in rows:
        lines.append((joined(row), row["state"]))
        below = [text if name == "differs" else f"{name} {text}" for name in sizes
                 if name not in shown and (text := row.get(name))]  # fmt: skip
        lines += [(line, "") for text in below for line in _wrapped(text, int(width))]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
    )


def _coloured(text: "Text", state: str) -> "Text":
    if style := _STYLES.get(state):
        text.highlight_words([f"  {state}"], style)
    return text


def _below(path: Path, root: Path) -> str:
    return name_below(path, root) if path.is_relative_to(root) else str(Path(*path.parts[-2:]))


def _cells(directory: RunDirectory, standing: Standing) -> dict[str, str]:
    state, why, job = standing
    summary, rows, job_id = directory.read_summary(), last_rows(directory.metrics), directory.job_id or ""
    step = max([number(summary.get("step")), *(number(row["step"]) for row in rows)], key=lambda step: (step == step, step))
    total_steps = number(summary.get("total_steps"))
    pace = next((number(row.get("step_s")) for row in reversed(rows) if row["split"] == "train"), math.nan)
    cells = {"state": state, "metric": _last_metric(rows, str(summary.get("monitor"))), "job": job_id}
    if math.isfinite(step):
        cells["step"] = f"{step:.0f}" + (f"/{total_steps:.0f}" if math.isfinite(total_steps) else "")
    if state == "running":
        cells["node"] = job.nodes if job else str(Lock(directory.path).holder().get("host", ""))
        if abs(eta_s := (total_steps - step) * pace) < _LONGEST_S:  # false if it is nan
            cells["ETA"] = str(timedelta(seconds=math.ceil(eta_s)))
    return cells | {"why": " ".join(why.split())}


def _last_metric(rows: list[Row], monitor: str) -> str:
    """Return the last value of checkpoint.monitor. Before the first evaluation, return the training loss."""
    for name in (monitor, "train/loss"):
        split, _, metric = name.partition("/")
        for row in reversed(rows):
            if row["split"] == split and metric in row:
                return f"{name} {number(row[metric]):.4g}"
    return ""
