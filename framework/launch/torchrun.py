"""Under torchrun (or any launcher that speaks its variables) or mpirun: rank 0 composes, the others take the result."""

from collections.abc import Callable
from datetime import timedelta

from framework.config.frozen_file import FrozenConfig
from framework.distributed.mpi import start as mpi
from framework.launch.claim import ClaimedRun, as_text, from_text, print_problems
from framework.runs.directory import RunDirectory
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit, headline, is_lost_peer
from framework.runtime.log import LOGGER
from framework.runtime.parent_death import die_with_parent


def join(begin: Callable[[], ClaimedRun | int], *, environment: Environment) -> int:
    """Run this rank's part. Rank 0 alone calls `begin`, which composes, checks and makes the directory."""
    die_with_parent()
    if environment.uses_mpi and (problem := mpi.problem(environment)) is not None:
        # they have no means to agree on who speaks; and if rank 0 has not spoken, the problem is this node's alone
        return print_problems([problem], each_rank=True)
    begun = begin() if environment.rank == 0 else None  # the lock of a run stays with this process until it ends
    taken = _from_rank_0(begun.frozen if isinstance(begun, ClaimedRun) else begun, environment=environment)
    code = _work(taken, environment=environment) if isinstance(taken, FrozenConfig) else taken
    if environment.uses_mpi and code is not None:
        mpi.leave()
    return Exit.FAILED if code is None else code


def _work(frozen: FrozenConfig, *, environment: Environment) -> int | None:
    """Run the worker. Returns the exit code that all ranks agree on, None if this rank has failed."""
    from framework.launch.worker import work

    try:
        return work(frozen, None)
    except Exception as error:
        LOGGER.error("rank %d failed: %s", environment.rank, headline(error))
        if environment.uses_mpi and not is_lost_peer(error):  # rank 0 will not: mpirun kills it
            told = f"rank {environment.rank}: {headline(error)}"
            RunDirectory(frozen.path.parent).record_end(status="failed", error=told)
        return None


def _from_rank_0(decision: FrozenConfig | int | None, *, environment: Environment) -> FrozenConfig | int:
    """Hand rank 0's decision to every rank. Collective."""
    text = None if decision is None else as_text(decision)
    timeout = timedelta(minutes=10)
    if environment.uses_mpi:
        return from_text(mpi.from_rank_0(text, timeout=timeout))
    from framework.distributed.groups import launcher_store

    store = launcher_store(environment, timeout=timeout, part="start")
    if text is not None:
        store.set("decision", text)
    return from_text(store.get("decision").decode())
