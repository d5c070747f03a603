"""Why workers end: the failure that each worker records, the failure that is the cause, and the run's record."""

import dataclasses
import json
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from framework.runs.directory import RunDirectory
from framework.runtime import log
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit, headline, is_lost_peer, place_of
from framework.runtime.files import write_atomically
from framework.runtime.log import LOGGER

SMALLER = "steadfast_smaller"  # an attribute of an error: the micro-batch size of the next attempt


@dataclass(frozen=True)
class Failure:
    """The reason why a worker ended."""

    rank: int
    error: str
    where: str
    lost_peer: bool = False  # the error only reports that another rank has ended
    time: float = 0.0  # in seconds since the epoch
    smaller: int | None = None  # after a lack of memory: with this micro-batch size, the workers start again

    @classmethod
    def of(cls, error: Exception, *, rank: int) -> "Failure":
        where, smaller = place_of(error), getattr(error, SMALLER, None)
        return cls(rank, headline(error), where, lost_peer=is_lost_peer(error), time=time.time(), smaller=smaller)

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.error}"


def starts_again(failure: Failure, directory: RunDirectory) -> bool:
    """Return, and log, whether the workers start again with smaller micro-batches. This does not count as a restart."""
    if failure.smaller is not None:
        with log.log_file(directory.log):
            LOGGER.warning("rank %d lacks memory: the run starts again with micro-batches of %d", failure.rank, failure.smaller)
    return failure.smaller is not None


def record_failure(error: Exception, *, environment: Environment, scratch: Path | None) -> None:
    """Write the traceback to train.log, and the headline into a file that the parent reads."""
    log.to_files(traceback.format_exc())
    if scratch is not None:
        text = json.dumps(dataclasses.asdict(Failure.of(error, rank=environment.rank)))
        write_atomically(scratch / f"failure_{environment.attempt}_{environment.rank}.json", text)


def recorded_failures(scratch: Path, *, attempt: int) -> list[Failure]:
    """Return the recorded failures of an attempt's workers, the earliest first. Failures that only lost a peer come last."""
    found = [Failure(**json.loads(path.read_text())) for path in scratch.glob(f"failure_{attempt}_*.json")]
    return sorted(found, key=lambda failure: (failure.lost_peer, failure.time))


def cause(recorded: list[Failure], ended: dict[int, ProcessFailure], *, pids: Mapping[int, int]) -> Failure:
    """Return the failure that caused the others. (If a worker is killed, its peers only lose their connection to it.)

    `recorded` are the failures that the workers have written. `ended` are the processes that the agent has seen end, by rank.
    The result is a lost peer only if all ranks of `pids` have lost a peer.
    """
    if recorded and not recorded[0].lost_peer:
        return recorded[0]
    quiet = set(pids) - {failure.rank for failure in recorded}
    aborted = {rank for rank in quiet if rank in ended and ended[rank].exitcode == -signal.SIGABRT}
    # NCCL aborts a process if its peer has ended
    silent = sorted(quiet, key=lambda rank: (rank in aborted and torch.cuda.is_available(), rank))
    for rank in silent:
        if rank in ended and ended[rank].exitcode < 0:
            name = ended[rank].signal_name()
            # a kill from outside may not repeat, and NCCL aborts if another rank has ended; any other library that aborts will
            # do it again in the same way
            may_not_repeat = name == "SIGKILL" or (name == "SIGABRT" and torch.cuda.is_available())
            where = f"process {ended[rank].pid}" if may_not_repeat else "a place outside of Python, in a library"
            if name == "SIGABRT" and len(quiet) + len(recorded) > 1 and not may_not_repeat:
                size = "gloo ends a process if a message has another size than it expects"
                where += f" ({size}: do all processes run the same blocks of the model?)"
            return Failure(rank, f"killed by {name}", where)
    if silent:  # the agent has seen the end of one process only, and this process had lost a peer
        return Failure(silent[0], "killed, without a message", f"process {pids[silent[0]]}")  # it may not repeat
    return recorded[0]


def report(how: Failure | str, directory: RunDirectory) -> Exit:
    """Record and log the failure of a worker, or the verdict on a hang. Return the exit code."""
    error, more, code = str(how), "the stacks of all ranks are", Exit.HANG
    if isinstance(how, Failure):
        error, more, code = f"rank {how.rank}: {how.error}", f"at {how.where}\n  the whole log is", Exit.FAILED
    directory.record_end(status="failed", error=error)
    with log.log_file(directory.log):
        LOGGER.error("%s\n  %s in %s", how, more, directory.log)
    return code
