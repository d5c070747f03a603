"""Slurm's own commands, and the states of jobs."""

import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from framework.runtime.environment import outside_of_jobs

_PATIENCE_S = 60.0  # with a busy controller that is asked to change something
_TO_ANSWER_S = 15.0  # a question
_QUESTIONS = ("squeue", "sinfo", "sacct", "sacctmgr", "show", "--test-only")
_MOST_IDS = 1000  # in one command
SETUP_FAILED = "launch.slurm.setup failed with"  # in a job's output: the code, and the line


class SlurmFailed(Exception):
    """One of Slurm's commands has failed; the message is the command's."""


class SlurmSilent(SlurmFailed):
    """Slurm has not answered: its controller is down, busy, or not reached from here. It may answer later."""


@dataclass(frozen=True)
class QueuedJob:
    """A job that waits or runs."""

    job_id: str  # 12_3 for a job of an array
    state: str  # in Slurm's words
    nodes: str
    reason: str  # why it waits

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


def queue(job_ids: Iterable[str]) -> dict[str, QueuedJob]:
    """Return which of the jobs wait or run, by their ids. SlurmFailed if that cannot be known."""
    output = ""
    for ids in _lists(job_ids):
        try:
            output += ask("squeue", "--noheader", "--array", f"--jobs={ids}", "--format=%i|%T|%N|%r")
        except SlurmSilent:
            raise
        except SlurmFailed as error:
            if "Invalid job id" not in str(error):  # the only id, and so old that the controller has forgotten it
                raise
    jobs = [QueuedJob(*line.split("|", 3)) for line in output.splitlines()]
    return {job.job_id: job for job in jobs}


def _lists(job_ids: Iterable[str]) -> list[str]:
    """Return the ids in lists that fit into a command line."""
    ids = list(job_ids)
    return [",".join(ids[first : first + _MOST_IDS]) for first in range(0, len(ids), _MOST_IDS)]


def ends(job_ids: Iterable[str]) -> dict[str, str]:
    """Return how jobs ended, as Slurm says it, by id; empty if the site keeps no accounts."""
    output = ""
    with suppress(SlurmFailed):
        for ids in _lists(job_ids):
            output += ask("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={ids}", "--format=JobID,State")
    return dict(line.split("|", 1) for line in output.splitlines())  # type: ignore[misc]


def job_facts(job_id: str) -> dict[str, str]:
    """Return the controller's facts about a job that it remembers, by scontrol's names."""
    return dict(re.findall(r"(\w+)=(\S*)", ask("scontrol", "show", "job", "--oneliner", job_id)))


def address_of_first(nodes: str) -> str:
    """Return the address of the first of Slurm's `node[1-4]`. SlurmFailed if it cannot be known."""
    first = ask("scontrol", "show", "hostnames", nodes).split()[0]
    match = re.search(r"\bNodeAddr=(\S+)", ask("scontrol", "show", "node", "--oneliner", first))
    return match[1] if match is not None else first


def largest_array() -> int:
    """Return how many jobs an array may have. SlurmFailed if that cannot be known."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) if match is not None else 1


def ask(*command: str) -> str:
    """Run one of Slurm's commands and return what it prints. SlurmFailed if it fails, SlurmSilent if there is no answer."""
    patience_s = _TO_ANSWER_S if not {*_QUESTIONS}.isdisjoint(command) else _PATIENCE_S
    try:
        with outside_of_jobs():
            done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s)
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"no word from {command[0]} in {patience_s:g} s") from None
    except OSError as error:
        raise SlurmSilent(str(error)) from None
    if done.returncode != 0:
        raise failure(done.stderr or f"{command[0]} ended with {done.returncode}")
    return done.stdout


def failure(text: str) -> SlurmFailed:
    """Return the error that a command's words tell of."""
    kind = SlurmSilent if re.search(_UNHEARD, text, re.IGNORECASE) else SlurmFailed
    return kind(" ".join(text.split()))


# Slurm's own errors of communication, for which its commands have no exit code of their own
_UNHEARD = "unable to contact|unable to connect|timed out|connection refused|communication|zero bytes were transmitted"
