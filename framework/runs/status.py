"""The states of runs, from the runs' directories, and from Slurm for runs in its queue."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from framework.runs.directory import RunDirectory
from framework.runtime import slurm
from framework.runtime.log import LOGGER
from framework.runtime.slurm import QueuedJob, SlurmFailed


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
    in_queue, silence = {}, ""
    try:
        in_queue = queued_jobs(by_path.values())
    except SlurmFailed as error:
        silence = f"Slurm does not answer: {error}"
    states = {path: _state(directory, in_queue.get(path), silence) for path, directory in by_path.items()}
    # jobs that did not record their end in the run's directory
    lost = {path: job_id for path, state in states.items()
            if state == "killed" and (job_id := by_path[path].job_id) is not None}  # fmt: skip
    ends = slurm.ends(lost.values()) if lost and not silence else {}
    found = {path: _last_words(by_path[path], ends.get(job_id, "")) for path, job_id in lost.items()}
    if "?" in states.values():
        LOGGER.warning("%s: a state that only Slurm knows is shown as ?", silence)
    return {path: found.get(path) or _standing(by_path[path], states[path], in_queue.get(path)) for path in by_path}


def _state(directory: RunDirectory, job: QueuedJob | None, silence: str) -> str:
    """Return the state from the run's directory, or Slurm's newer state. Return `?` if Slurm knows it, but does not answer."""
    own = directory.state
    if silence and directory.job_id and own in ("queued", "killed", "preempted"):
        return "?"
    if silence:
        return own
    if job is not None and own not in ("finished", "failed"):
        return "queued" if job.waits else "running"
    return "killed" if own == "queued" else own  # the job has left the queue without a start


def _standing(directory: RunDirectory, state: str, job: QueuedJob | None) -> Standing:
    if job is not None and state == "queued":
        return Standing(state, job.reason, job)
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
