"""How runs stand, as mode=status tells it: from their directories, and from Slurm for those that it has."""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import Row, rows_in
from framework.runs.report import number, printable, told
from framework.runtime import slurm
from framework.runtime.log import LOGGER
from framework.runtime.slurm import QueuedJob, SlurmFailed

_TAIL_BYTES = 65536  # of metrics.jsonl: some hundred rows


@dataclass(frozen=True)
class Status:
    """How one run stands."""

    directory: RunDirectory
    state: str  # as RunDirectory's, or `unreadable`
    step: float = math.nan  # where it is not known, as in the other numbers
    total_steps: float = math.nan
    eta_s: float = math.nan  # of one that runs, at the speed of its last row
    metric: str = ""  # the last checkpoint.monitor, or training loss
    job_id: str = ""
    node: str = ""
    why: str = ""  # it failed, was killed, or waits


def queued_jobs(directories: Iterable[RunDirectory]) -> dict[Path, QueuedJob]:
    """Return the Slurm jobs of runs that wait or run, by the run's path. SlurmFailed if that cannot be known."""
    of_run = {directory.path: directory.job_id for directory in directories if directory.job_id is not None}
    jobs = slurm.queue(of_run.values())
    return {path: jobs[job_id] for path, job_id in of_run.items() if job_id in jobs}


def states_of(directories: Iterable[RunDirectory]) -> dict[Path, str]:
    """Return how runs stand, a word each. Where Slurm does not answer, what their directories tell."""
    directories = list(directories)
    in_queue, silence = _asked(directories)
    if silence:
        LOGGER.warning("%s", silence)
    return {directory.path: _state(directory, in_queue.get(directory.path), silence) for directory in directories}


def _asked(directories: Iterable[RunDirectory]) -> tuple[dict[Path, QueuedJob], str]:
    """Return the queued jobs of runs, or why Slurm does not tell."""
    try:
        return queued_jobs(directories), ""
    except SlurmFailed as error:
        return {}, f"Slurm does not answer: {error}"


def read_all(directories: Sequence[RunDirectory]) -> list[Status]:
    """Return how runs stand. Where Slurm does not answer, what their directories tell."""
    odd = {directory.path: directory.odd_files() for directory in directories}
    in_queue, silence = _asked(directory for directory in directories if not odd[directory.path])
    found = [
        Status(directory, "unreadable", why=f"{odd[directory.path][0]} is not a plain file")
        if odd[directory.path]
        else _read(directory, in_queue.get(directory.path), silence)
        for directory in directories
    ]
    lost = [status.job_id for status in found if status.state == "killed" and status.job_id]
    ends = slurm.ends(lost) if lost and not silence else {}
    return [_explained(status, ends) for status in found]


def _explained(status: Status, ends: dict[str, str]) -> Status:
    """Return how a run stands with Slurm's word on its job's end, where the run has left none itself."""
    if status.why or status.state != "killed" or not status.job_id:
        return status
    # of one in an array that was cancelled while it waited, Slurm keeps no record
    never_began = "it left the queue before it began" if status.directory.state == "queued" else ""
    return replace(status, why=ends.get(status.job_id, never_began))


def _state(directory: RunDirectory, job: QueuedJob | None, silence: str) -> str:
    """Return the run's own word, but where Slurm knows better: it waits, it has started, it was cancelled while it waited."""
    own = directory.state
    if silence:
        return own
    if job is not None and own not in ("finished", "failed"):
        return "queued" if job.waits else "running"
    return "killed" if own == "queued" else own


def _read(directory: RunDirectory, job: QueuedJob | None, silence: str) -> Status:
    summary = directory.read_summary()
    state = _state(directory, job, silence)
    rows = _last_rows(directory.metrics)
    step = max([number(summary.get("step")), *(number(row["step"]) for row in rows)], key=lambda step: (step == step, step))
    total_steps = number(summary.get("total_steps"))
    pace = next((number(row.get("step_s")) for row in reversed(rows) if row["split"] == "train"), math.nan)
    reasons = {"failed": summary.get("error"), "killed": summary.get("error"), "queued": job.reason if job else silence}
    is_there = state == "running"
    return Status(
        directory=directory,
        state=state,
        step=step,
        total_steps=total_steps,
        eta_s=(total_steps - step) * pace if is_there else math.nan,
        metric=_last_metric(rows, str(summary.get("monitor"))),
        job_id=directory.job_id or "",
        node=(job.nodes if job else directory.host) if is_there else "",
        why=" ".join(str(reasons.get(state) or "").split()),
    )


def _last_rows(path: Path) -> list[Row]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return rows_in(file.read())
    except OSError:
        return []


def _last_metric(rows: list[Row], monitor: str) -> str:
    """Return the last value of checkpoint.monitor; before the first evaluation, that of the training loss."""
    for name in (monitor, "train/loss"):
        split, _, metric = name.partition("/")
        for row in reversed(rows):
            if row["split"] == split and isinstance(row.get(metric), (int, float)):
                return f"{name} {row[metric]:.4g}"
    return ""


# --- printing it


def print_table(statuses: list[Status], labels: list[str]) -> None:
    """Print a table, a run a line. `labels` say what sets each apart."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [_cells(status, label) for status, label in zip(statuses, labels)]
    shown = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    table = Table(*shown, box=SIMPLE_HEAD, pad_edge=False)
    for status, row in zip(statuses, rows):
        table.add_row(*(Text(row[name], style=_STYLES.get(status.state, "") if name == "state" else "") for name in shown))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    console.print(table)
    console.print(told([status.state for status in statuses]))


_LONGEST_S = 1e9
_WIDE = 1000  # columns, of a file: it folds no line
_STYLES = {"finished": "green", "failed": "red", "killed": "red", "running": "cyan", "queued": "yellow", "preempted": "yellow"}


def _cells(status: Status, label: str) -> dict[str, str]:
    step = f"{status.step:.0f}" if math.isfinite(status.step) else ""
    if step and math.isfinite(status.total_steps):
        step += f"/{status.total_steps:.0f}"
    eta = str(timedelta(seconds=math.ceil(status.eta_s))) if abs(status.eta_s) < _LONGEST_S else ""
    cells = {"run": label, "state": status.state, "step": step, "ETA": eta, "metric": status.metric, "job": status.job_id}
    return {name: printable(text) for name, text in (cells | {"node": status.node, "why": status.why}).items()}
