"""Under torchrun (or any launcher that speaks its variables) or mpirun: rank 0 composes, the others take the result."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta

from framework.config.frozen_file import Frozen
from framework.distributed.mpi import start as mpi
from framework.launch.claim import Begun
from framework.launch.handover import as_text, from_text
from framework.runs.directory import RunDirectory
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit, headline, is_lost_peer
from framework.runtime.log import LOGGER
from framework.runtime.parent_death import die_with_parent
from framework.runtime.problem import Problem


def join(begin: Callable[[], Begun | Exit], *, environment: Environment) -> int:
    """Run this rank's part. Rank 0 alone calls `begin`, which composes, checks and makes the directory."""
    die_with_parent()
    if environment.uses_mpi and (problem := mpi.problem(environment)) is not None:
        return _refuse(problem, environment=environment)
    decision = begin() if environment.rank == 0 else None
    if isinstance(decision, Begun):
        decision = decision.frozen  # its lock stays with this process until it ends
    taken = _from_rank_0(decision, environment=environment)
    code = _work(taken, environment=environment) if isinstance(taken, Frozen) else taken
    if environment.uses_mpi and code is not None:
        mpi.leave()
    return Exit.FAILED if code is None else code


def _refuse(problem: Problem, *, environment: Environment) -> Exit:
    """Say why the processes that mpirun started cannot meet. One of them speaks, and they have no means to agree which."""
    if environment.rank != 0:
        # when rank 0 has spoken and ends, mpirun ends the others; if it does not, then the problem is this node's alone
        time.sleep(5)
    print(problem, file=sys.stderr)
    return Exit.CONFIGURATION


def _work(frozen: Frozen, *, environment: Environment) -> int | None:
    """Run the worker. Returns the exit code that all ranks agree on, None if this rank has failed."""
    from framework.launch.worker import work

    try:
        return work(frozen, None)
    except Exception as error:
        LOGGER.error("rank %d failed: %s", environment.rank, headline(error))
        if environment.uses_mpi and not is_lost_peer(error):  # rank 0 will not: mpirun kills it
            record = RunDirectory(frozen.path.parent).record_end
            record(status="failed", error=f"rank {environment.rank}: {headline(error)}")
        return None


def _from_rank_0(decision: Frozen | int | None, *, environment: Environment) -> Frozen | int:
    """Hand rank 0's decision to every rank. Collective."""
    text = None if decision is None else as_text(decision)
    timeout = timedelta(minutes=10)
    if environment.uses_mpi:
        return from_text(mpi.from_rank_0(text, timeout=timeout))
    return from_text(_through_store(text, environment=environment, timeout=timeout))


def _through_store(text: str | None, *, environment: Environment, timeout: timedelta) -> str:
    from framework.distributed.world import launcher_store

    store = launcher_store(environment, timeout=timeout, part="start")
    if text is not None:
        store.set("decision", text)
    return store.get("decision").decode()
