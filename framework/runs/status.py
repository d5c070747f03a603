"""The states of runs, from the runs' directories, and from Slurm for runs in its queue; and their table (mode=status)."""

import json
import math
import re
import sys
from collections.abc import Container, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import Row, last_rows, number
from framework.runs.report import count_states, name_below, printable
from framework.runs.settings import differences
from framework.runtime import slurm
from framework.runtime.environment import variables
from framework.runtime.lock import Lock
from framework.runtime.log import LOGGER
from framework.runtime.slurm import QueuedJob, SlurmFailed

if TYPE_CHECKING:
    from rich.table import Table


def queued_jobs(directories: Iterable[RunDirectory]) -> dict[Path, QueuedJob]:
    """Return the Slurm jobs of runs that wait or run, by the run's path. Raise SlurmFailed if Slurm does not answer."""
    of_run = {directory.path: directory.job_id for directory in directories if directory.job_id is not None}
    jobs = slurm.queue(of_run.values())
    return {path: jobs[job_id] for path, job_id in of_run.items() if job_id in jobs}


class Standing(NamedTuple):
    """The state of a run, with the reason."""

    state: str  # RunDirectory's state, or Slurm's newer one: queued, cancelled; `?` if Slurm knows it, but does not answer
    why: str = ""
    job: QueuedJob | None = None  # the job that waits or runs


def standings(directories: Iterable[RunDirectory]) -> dict[Path, Standing]:
    """Return the states of runs, by their paths: from their directories, and from Slurm if they are Slurm jobs."""
    by_path = {directory.path: directory for directory in directories}
    jobs, silence = dict[Path, QueuedJob](), ""
    try:
        jobs = queued_jobs(by_path.values())
    except SlurmFailed as error:
        silence = f"Slurm does not answer: {error}"
    found = {path: _standing(directory, jobs.get(path), is_silent=bool(silence)) for path, directory in by_path.items()}
    if any(standing.state == "?" for standing in found.values()):
        LOGGER.warning("%s: a state that only Slurm knows is shown as ?", silence)
    # jobs that did not record their end in the run's directory
    lost = {path: job_id for path, standing in found.items()
            if standing.state == "killed" and (job_id := by_path[path].job_id) is not None}  # fmt: skip
    ends = slurm.ends(lost.values()) if lost and not silence else {}
    return found | {path: _last_words(by_path[path], ends.get(job_id, "")) for path, job_id in lost.items()}


def _standing(directory: RunDirectory, job: QueuedJob | None, *, is_silent: bool) -> Standing:
    """Return the state from the run's directory, or Slurm's newer state. Return `?` if Slurm knows it, but does not answer."""
    state = directory.state
    if is_silent and directory.job_id and state in ("queued", "killed", "preempted"):
        return Standing("?")
    if job is not None and state not in ("finished", "failed"):
        return Standing("queued", job.reason, job) if job.waits else Standing("running", job=job)
    if state == "queued" and not is_silent:
        state = "killed"  # the job has left the queue without a start
    return Standing(state, str(directory.read_summary().get("error") or "") if state in ("failed", "killed") else "", job)


_SRUN_ENDS = r"srun: error: .*: Exited with exit code \d+"  # this follows a task's own last lines
_FAULTS = ("FAILED", "COMPLETED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE")  # job ends that another attempt would repeat


def _last_words(directory: RunDirectory, end: str) -> Standing:
    """Return the state of a run that did not record its end, from its job's output and from `end`, Slurm's state of the job."""
    summary, lines = directory.read_summary(), directory.last_lines_of_job()
    has_begun = summary.get("status") != "queued"
    # Slurm keeps no record of an array's job that was cancelled while it waited
    if end.startswith("CANCELLED") or not (end or has_begun or lines):
        return Standing("cancelled", end or "it left the queue before it began")
    if told := next((line for line in reversed(lines) if line.startswith(slurm.SETUP_FAILED)), ""):
        return Standing("failed", told)
    own = [line for line in lines if not re.fullmatch(_SRUN_ENDS, line)] or lines
    words = str(summary.get("error") or "") or ": ".join([*filter(None, [end]), *own[-1:]])
    if not has_begun and (not end or end.split()[0] in _FAULTS):
        return Standing("failed", f"the job ended before the run began: {words}")
    return Standing("killed", words)


# --- the table of mode=status


_LONGEST_S, _WHOLE = 1e9, 1 << 20
_STYLES = {"finished": "green", "failed": "red", "killed": "red", "running": "cyan", "queued": "yellow", "preempted": "yellow",
           "cancelled": "yellow", "?": "magenta"}  # fmt: skip
_COLUMNS = ("run", "state", "step", "ETA", "metric", "differs", "job", "node", "why")
_DETAILS = _COLUMNS[3:]  # one column in a terminal that is too narrow for all columns


def print_table(
    directories: Sequence[RunDirectory], *, root: Path, values: Sequence[str] | None = None, pruned: Container[Path] = ()
) -> None:
    """Print a table of the runs below `root`, and the number of runs. Nothing is cut: run.dir accepts the text in `run`.

    `values` describe how each run differs from the others of its sweep. With None, the configurations are compared. `pruned`
    are the runs that a search has ended.
    """
    odd = {directory.path: files for directory in directories if (files := directory.odd_files())}
    sound = [directory for directory in directories if directory.path not in odd]
    found = standings(sound)
    found |= {path: standing._replace(state="pruned") for path, standing in found.items() if path in pruned}
    if values is None:
        by_path = differences(directory.path for directory in sound)
        values = [by_path.get(directory.path, "") for directory in directories]
    rows = list[dict[str, str]]()
    for directory, differs in zip(directories, values):
        cells = {"run": name_below(directory.path, root), "differs": differs}
        if path_odd := odd.get(directory.path):
            cells |= {"state": "unreadable", "why": f"{path_odd[0]} is not a plain file"}
        else:
            cells |= _cells(directory, found[directory.path])
        rows.append({name: printable(text) for name, text in cells.items()})
    if variables().get("STEADFAST_JSON"):
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else _WHOLE)  # a file has whole lines
    table = _table(rows)
    if console.measure(table, options=console.options.update(width=_WHOLE)).maximum > console.width:
        named = [[f"{name} {text}" if name in ("ETA", "job", "node") else text for name in _DETAILS if (text := row.get(name))]
                 for row in rows]  # fmt: skip
        table = _table([{**row, **dict.fromkeys(_DETAILS, ""), "details": "  ".join(texts)} for row, texts in zip(rows, named)])
    console.print(table)
    console.print(count_states([row["state"] for row in rows]), markup=False)


def _table(rows: Sequence[dict[str, str]]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="none")
    columns = [name for name in (*_COLUMNS, "details") if any(row.get(name) for row in rows)]
    for name in columns:
        table.add_column(name, no_wrap=name != "details", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row.get(name, ""), _STYLES.get(row[name], "") if name == "state" else "") for name in columns))
    return table


def _cells(directory: RunDirectory, standing: Standing) -> dict[str, str]:
    state, why, job = standing
    summary, rows, job_id = directory.read_summary(), last_rows(directory.metrics), directory.job_id or ""
    step = last_step(summary, rows)
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


def last_step(summary: dict[str, Any], rows: list[Row]) -> float:
    """Return a run's step: the summary may be older than the rows. nan: it is not known."""
    known = [step for step in (number(summary.get("step")), *(number(row["step"]) for row in rows)) if step == step]
    return max(known, default=math.nan)


def _last_metric(rows: list[Row], monitor: str) -> str:
    """Return the last value of checkpoint.monitor. Before the first evaluation, return the training loss."""
    for name in (monitor, "train/loss"):
        split, _, metric = name.partition("/")
        for row in reversed(rows):
            if row["split"] == split and metric in row:
                return f"{name} {number(row[metric]):.4g}"
    return ""
