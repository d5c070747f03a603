"""The states of runs and the table of mode=status: from the runs' directories, and from Slurm for runs in its queue."""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

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


def states_of(directories: Iterable[RunDirectory]) -> dict[Path, str]:
    """Return each run's state; if Slurm does not answer, the state from the run's directory."""
    states, _, silence = _ask_slurm(list(directories))
    if silence:
        LOGGER.warning("%s", silence)
    return states


def _ask_slurm(directories: Sequence[RunDirectory]) -> tuple[dict[Path, str], dict[Path, QueuedJob], str]:
    in_queue, silence = {}, ""
    try:
        in_queue = queued_jobs(directories)
    except SlurmFailed as error:
        silence = f"Slurm does not answer: {error}"
    states = {directory.path: _state(directory, in_queue.get(directory.path), silence) for directory in directories}
    return states, in_queue, silence


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


def print_table(directories: Sequence[RunDirectory], labels: Sequence[str]) -> None:
    """Print a table, a line for each run. `labels` say how the runs differ."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    odd = {directory.path: files for directory in directories if (files := directory.odd_files())}
    readable = [directory for directory in directories if directory.path not in odd]
    states, in_queue, silence = _ask_slurm(readable)
    lost = {directory.path: directory.job_id for directory in readable
            if directory.job_id is not None and states[directory.path] == "killed"}  # fmt: skip
    ends = slurm.ends(lost.values()) if lost and not silence else {}
    words = {path: _last_words(RunDirectory(path), ends.get(job_id, "")) for path, job_id in lost.items()}
    states |= {path: state for path, (state, _) in words.items()}
    rows = []
    for directory, label in zip(directories, labels):
        if path_odd := odd.get(directory.path):
            cells = {"state": "unreadable", "why": f"{path_odd[0]} is not a plain file"}
        else:
            why = words[directory.path][1] if directory.path in words else ""
            cells = _cells(directory, states[directory.path], in_queue.get(directory.path), why)
        rows.append({name: printable(text) for name, text in {"run": label, **cells}.items()})
    columns = ("run", "state", "step", "ETA", "metric", "job", "node", "why")
    shown = [name for name in columns if any(row.get(name) for row in rows)]
    table = Table(*shown, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        styles = {"state": _STYLES.get(row["state"], "")}
        table.add_row(*(Text(row.get(name, ""), style=styles.get(name, "")) for name in shown))
    if silence and "?" in states.values():
        LOGGER.warning("%s: what it would tell of these runs is shown as ?", silence)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    console.print(table)
    console.print(count_states([row["state"] for row in rows]))


def _last_words(directory: RunDirectory, end: str) -> tuple[str, str]:
    """Return the state of a run whose job has left no word in its directory, and why: by Slurm's word for its `end`."""
    lines = directory.last_lines_of_job()
    if told := next((line for line in reversed(lines) if line.startswith(slurm.SETUP_FAILED)), ""):
        return "failed", told
    # Slurm keeps no record of a job of an array that was cancelled while it waited
    if end.startswith("CANCELLED") or (not end and directory.read_summary().get("status") == "queued"):
        return "cancelled", end or "it left the queue before it began"
    return "killed", ": ".join([*filter(None, [end]), *lines[-1:]])


def _cells(directory: RunDirectory, state: str, job: QueuedJob | None, last_words: str) -> dict[str, str]:
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
    error = summary.get("error") if state in ("failed", "killed") else ""
    why = job.reason if job and state == "queued" else error or last_words
    return cells | {"why": " ".join(str(why or "").split())}


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
