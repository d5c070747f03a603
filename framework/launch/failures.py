"""Why workers end: what each puts on record, which of them is the cause, and what the run's record says."""

import dataclasses
import json
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from framework.runs.directory import RunDirectory
from framework.runtime import log
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit, headline, is_lost_peer, place_of
from framework.runtime.files import write_atomically
from framework.runtime.log import LOGGER


@dataclass(frozen=True)
class Failure:
    """Why a worker ended: the headline."""

    rank: int
    error: str
    where: str
    lost_peer: bool = False  # the error only says that another rank is gone
    time: float = 0.0  # seconds since the epoch

    @classmethod
    def of(cls, error: Exception, *, rank: int) -> "Failure":
        return cls(rank, headline(error), place_of(error), lost_peer=is_lost_peer(error), time=time.time())

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.error}"


def record_failure(error: Exception, *, environment: Environment, scratch: Path | None) -> None:
    """Keep the whole story in train.log, and the headline where the parent finds it."""
    log.to_files(traceback.format_exc())
    if scratch is not None:
        failure = Failure.of(error, rank=environment.rank)
        text = json.dumps(dataclasses.asdict(failure))
        write_atomically(scratch / f"failure_{environment.attempt}_{environment.rank}.json", text)


def recorded_failures(scratch: Path, *, attempt: int) -> list[Failure]:
    """Return what the workers of an attempt have recorded of their ends, the first first; those who lost a peer last."""
    found = [Failure(**json.loads(path.read_text())) for path in scratch.glob(f"failure_{attempt}_*.json")]
    return sorted(found, key=lambda failure: (failure.lost_peer, failure.time))


def cause(recorded: list[Failure], ended: dict[int, ProcessFailure], *, ranks: Iterable[int]) -> Failure:
    """Return the failure that caused the others: a worker that was killed leaves peers that merely miss it.

    `recorded` are those that the workers have written down; `ended` are the processes that the agent has seen end. A lost
    peer is the answer where all of these `ranks` have lost one.
    """
    if recorded and not recorded[0].lost_peer:
        return recorded[0]
    silent = sorted(set(ranks) - {failure.rank for failure in recorded})
    for rank in silent:
        if rank in ended and ended[rank].exitcode < 0:
            name = ended[rank].signal_name()
            # from outside, it may not come again; a library that aborts will do it in the same way
            where = f"process {ended[rank].pid}" if name == "SIGKILL" else "no place in Python: a library's own code"
            return Failure(rank, f"killed by {name}", where)
    if silent:  # the agent has looked at one process only, and that was a peer
        return Failure(silent[0], "killed, without a word", "no place in the code")
    return recorded[0]


def report(how: Failure | str, directory: RunDirectory) -> Exit:
    """Put on record that a worker failed, or the verdict on a hang. Returns the exit code."""
    if isinstance(how, str):
        error, more, code = how, "the stacks of all ranks are", Exit.HANG
    else:
        error, more, code = f"rank {how.rank}: {how.error}", f"at {how.where}\n  the whole story is", Exit.FAILED
    directory.record_end(status="failed", error=error)
    with log.launcher_file(directory.log):
        LOGGER.error("%s\n  %s in %s", how, more, directory.log)
    return code
