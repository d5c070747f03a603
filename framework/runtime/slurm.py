"""Slurm's commands, and the states of jobs."""

import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from framework.runtime.environment import outside_of_jobs

_PATIENCE_S = 60.0  # how long to wait for a busy controller, for a command that changes something
_TO_ANSWER_S = 15.0  # how long to wait for the answer to a question
_QUESTIONS = ("squeue", "sinfo", "sacct", "sacctmgr", "show", "--test-only")
_MOST_IDS = 1000  # in one command
SETUP_FAILED = "launch.slurm.setup failed with"  # this text is in a job's output, before the code and the line


class SlurmFailed(Exception):
    """A Slurm command has failed. The message is the command's message."""


class SlurmSilent(SlurmFailed):
    """Slurm has not answered: its controller is down, busy, or not reachable from this machine. It may answer later."""


@dataclass(frozen=True)
class QueuedJob:
    """A job that waits or runs."""

    job_id: str  # 12_3 for a job of an array
    state: str  # in Slurm's terms
    nodes: str
    reason: str  # why the job waits

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


def queue(job_ids: Iterable[str]) -> dict[str, QueuedJob]:
    """Return the jobs that wait or run, by their ids. Raise SlurmFailed if the jobs cannot be listed."""
    output = ""
    for ids in _lists(job_ids):
        try:
            output += ask("squeue", "--noheader", "--array", f"--jobs={ids}", "--format=%i|%T|%N|%r")
        except SlurmSilent:
            raise
        except SlurmFailed as error:
            if "Invalid job id" not in str(error):  # it is the only id, and so old that the controller has deleted its record
                raise
    jobs = [QueuedJob(*line.split("|", 3)) for line in output.splitlines()]
    return {job.job_id: job for job in jobs}


def _lists(job_ids: Iterable[str]) -> list[str]:
    """Return the ids in lists that fit into one command line."""
    ids = list(job_ids)
    return [",".join(ids[first : first + _MOST_IDS]) for first in range(0, len(ids), _MOST_IDS)]


def ends(job_ids: Iterable[str]) -> dict[str, str]:
    """Return how jobs ended, in Slurm's terms, by id. The result is empty if the site keeps no accounts."""
    output = ""
    with suppress(SlurmFailed):
        for ids in _lists(job_ids):
            output += ask("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={ids}", "--format=JobID,State")
    return dict(line.split("|", 1) for line in output.splitlines())  # type: ignore[misc]


def job_facts(job_id: str) -> dict[str, str]:
    """Return the controller's facts about a job that it remembers, under the names of scontrol."""
    return dict(re.findall(r"(\w+)=(\S*)", ask("scontrol", "show", "job", "--oneliner", job_id)))


def address_of_first(nodes: str) -> str:
    """Return the address of the first node of a Slurm list (`node[1-4]`). Raise SlurmFailed if there is no answer."""
    first = ask("scontrol", "show", "hostnames", nodes).split()[0]
    match = re.search(r"\bNodeAddr=(\S+)", ask("scontrol", "show", "node", "--oneliner", first))
    return match[1] if match is not None else first


def largest_array() -> int:
    """Return how many jobs an array may have. Raise SlurmFailed if the limit cannot be read."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) if match is not None else 1


def ask(*command: str) -> str:
    """Run a Slurm command and return its output. Raise SlurmFailed if it fails, SlurmSilent if there is no answer."""
    patience_s = _TO_ANSWER_S if not {*_QUESTIONS}.isdisjoint(command) else _PATIENCE_S
    try:
        with outside_of_jobs():
            done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s)
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"no answer from {command[0]} within {patience_s:g} s") from None
    except OSError as error:
        raise SlurmSilent(str(error)) from None
    if done.returncode != 0:
        raise failure(done.stderr or f"{command[0]} ended with {done.returncode}")
    return done.stdout


def failure(text: str) -> SlurmFailed:
    """Return the error for a command's error message."""
    kind = SlurmSilent if re.search(_UNHEARD, text, re.IGNORECASE) else SlurmFailed
    return kind(" ".join(text.split()))


# Slurm's communication errors; its commands have no separate exit code for them
_UNHEARD = "unable to contact|unable to connect|timed out|connection refused|communication|zero bytes were transmitted"
