"""The states of runs and the table of mode=status: from the runs' directories, and from Slurm for runs in its queue."""

import math
import os
import re
import sys
from collections.abc import Container, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import Row, rows_in
from framework.runs.report import count_states, number, printable
from framework.runtime import slurm
from framework.runtime.lock import Lock
from framework.runtime.log import LOGGER
from framework.runtime.slurm import QueuedJob, SlurmFailed

_TAIL_BYTES = 65536  # of metrics.jsonl: some hundred rows
_LONGEST_S = 1e9
_WIDE = 1000  # columns, of a file: it folds no line
_STYLES = {"finished": "green", "failed": "red", "killed": "red", "running": "cyan", "queued": "yellow", "preempted": "yellow",
           "cancelled": "yellow", "?": "magenta"}  # fmt: skip


def queued_jobs(directories: Iterable[RunDirectory]) -> dict[Path, QueuedJob]:
    """Return the Slurm jobs of runs that wait or run, by the run's path. SlurmFailed if that cannot be known."""
    of_run = {directory.path: directory.job_id for directory in directories if directory.job_id is not None}
    jobs = slurm.queue(of_run.values())
    return {path: jobs[job_id] for path, job_id in of_run.items() if job_id in jobs}


class Standing(NamedTuple):
    """How a run stands."""

    state: str  # RunDirectory's, or Slurm's newer one: queued, cancelled; `?` if Slurm would know, but is silent
    why: str = ""
    job: QueuedJob | None = None  # that waits or runs


def standings(directories: Iterable[RunDirectory]) -> dict[Path, Standing]:
    """Return how runs stand, by their paths: from their directories, and from Slurm where they are its jobs."""
    by_path = {directory.path: directory for directory in directories}
    in_queue, silence = {}, ""
    try:
        in_queue = queued_jobs(by_path.values())
    except SlurmFailed as error:
        silence = f"Slurm does not answer: {error}"
    states = {path: _state(directory, in_queue.get(path), silence) for path, directory in by_path.items()}
    # jobs that have left no word in the run's directory
    lost = {path: job_id for path, state in states.items()
            if state == "killed" and (job_id := by_path[path].job_id) is not None}  # fmt: skip
    ends = slurm.ends(lost.values()) if lost and not silence else {}
    found = {path: _last_words(by_path[path], ends.get(job_id, "")) for path, job_id in lost.items()}
    if "?" in states.values():
        LOGGER.warning("%s: what it would tell of these runs is shown as ?", silence)
    return {path: found.get(path) or _standing(by_path[path], states[path], in_queue.get(path)) for path in by_path}


def _state(directory: RunDirectory, job: QueuedJob | None, silence: str) -> str:
    """Return the state from the run's directory, unless Slurm knows a newer one; `?` if it would, but is silent."""
    own = directory.state
    if silence and directory.job_id and own in ("queued", "killed", "preempted"):
        return "?"
    if silence:
        return own
    if job is not None and own not in ("finished", "failed"):
        return "queued" if job.waits else "running"
    return "killed" if own == "queued" else own  # it has left the queue, and never begun


def _standing(directory: RunDirectory, state: str, job: QueuedJob | None) -> Standing:
    if job is not None and state == "queued":
        return Standing(state, job.reason, job)
    return Standing(state, str(directory.read_summary().get("error") or "") if state in ("failed", "killed") else "", job)


_SRUN_ENDS = r"srun: error: .*: Exited with exit code \d+"  # what comes after a task's own last words
_FAULTS = ("FAILED", "COMPLETED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE")  # ends of a job that another try would meet again


def _last_words(directory: RunDirectory, end: str) -> Standing:
    """Return how a run stands whose job has left no word in its directory: by its output, and Slurm's word for its `end`."""
    summary, lines = directory.read_summary(), directory.last_lines_of_job()
    has_begun = summary.get("status") != "queued"
    # Slurm keeps no record of a job of an array that was cancelled while it waited
    if end.startswith("CANCELLED") or not (end or has_begun or lines):
        return Standing("cancelled", end or "it left the queue before it began")
    if told := next((line for line in reversed(lines) if line.startswith(slurm.SETUP_FAILED)), ""):
        return Standing("failed", told)
    own = [line for line in lines if not re.fullmatch(_SRUN_ENDS, line)] or lines
    words = str(summary.get("error") or "") or ": ".join([*filter(None, [end]), *own[-1:]])
    if not has_begun and (not end or end.split()[0] in _FAULTS):
        return Standing("failed", f"the job ended before the run began: {words}")
    return Standing("killed", words)


def print_table(directories: Sequence[RunDirectory], labels: Sequence[str], *, pruned: Container[Path] = ()) -> None:
    """Print a table, a line for each run. `labels` say how the runs differ; `pruned` are those that a search has ended."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    odd = {directory.path: files for directory in directories if (files := directory.odd_files())}
    found = standings(directory for directory in directories if directory.path not in odd)
    found |= {path: standing._replace(state="pruned") for path, standing in found.items() if path in pruned}
    rows = []
    for directory, label in zip(directories, labels):
        if path_odd := odd.get(directory.path):
            cells = {"state": "unreadable", "why": f"{path_odd[0]} is not a plain file"}
        else:
            cells = _cells(directory, found[directory.path])
        rows.append({name: printable(text) for name, text in {"run": label, **cells}.items()})
    columns = ("run", "state", "step", "ETA", "metric", "job", "node", "why")
    shown = [name for name in columns if any(row.get(name) for row in rows)]
    table = Table(*shown, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        styles = {"state": _STYLES.get(row["state"], "")}
        table.add_row(*(Text(row.get(name, ""), style=styles.get(name, "")) for name in shown))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    console.print(table)
    console.print(count_states([row["state"] for row in rows]))


def _cells(directory: RunDirectory, standing: Standing) -> dict[str, str]:
    state, why, job = standing
    summary, rows, job_id = directory.read_summary(), _last_rows(directory.metrics), directory.job_id or ""
    step = max([number(summary.get("step")), *(number(row["step"]) for row in rows)], key=lambda step: (step == step, step))
    total_steps = number(summary.get("total_steps"))
    pace = next((number(row.get("step_s")) for row in reversed(rows) if row["split"] == "train"), math.nan)
    cells = {"state": state, "metric": _last_metric(rows, str(summary.get("monitor"))), "job": job_id}
    if math.isfinite(step):
        cells["step"] = f"{step:.0f}" + (f"/{total_steps:.0f}" if math.isfinite(total_steps) else "")
    if state == "running":
        cells["node"] = job.nodes if job else str(Lock(directory.path).holder().get("host", ""))
        if abs(eta_s := (total_steps - step) * pace) < _LONGEST_S:  # not if it is nan
            cells["ETA"] = str(timedelta(seconds=math.ceil(eta_s)))
    return cells | {"why": " ".join(why.split())}


def _last_rows(path: Path) -> list[Row]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return rows_in(file.read())
    except OSError:
        return []


def _last_metric(rows: list[Row], monitor: str) -> str:
    """Return the last value of checkpoint.monitor; before the first evaluation, the training loss."""
    for name in (monitor, "train/loss"):
        split, _, metric = name.partition("/")
        for row in reversed(rows):
            if row["split"] == split and isinstance(row.get(metric), (int, float)):
                return f"{name} {row[metric]:.4g}"
    return ""
