"""MPI, through mpi4py: its start, its end, and the communicator of all ranks."""

import functools
import importlib.util
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

INSTALL = "pip install 'steadfast[mpi]', or mpi4py"


def is_missing() -> bool:
    return importlib.util.find_spec("mpi4py") is None


@functools.cache
def library() -> Any:
    """Return mpi4py's MPI module, and start MPI. Raise RuntimeError if MPI cannot start."""
    import mpi4py

    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("OMPI_MCA_btl", "^tcp")  # Open MPI's TCP would listen on every network; memory is shared here
    # MPI_Finalize waits for every rank: a failed rank must not wait, because the others wait for it
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py is installed, but no MPI library
        raise RuntimeError(f"mpi4py cannot start MPI: {' '.join(str(error).split())} ({INSTALL})") from error
    return MPI


@functools.cache
def world() -> tuple[Any, Any]:
    """Return the communicator of all ranks, and the communicator of this node's ranks. Collective.

    mpirun may number a node's processes in another order than their nodes. Here the ranks of a node are consecutive.
    """
    MPI = library()
    mpiruns = MPI.COMM_WORLD
    node = mpiruns.Split_type(MPI.COMM_TYPE_SHARED, key=mpiruns.rank)
    first = node.bcast(mpiruns.rank, root=0)
    return mpiruns.Split(0, key=first * mpiruns.size + node.rank), node


def complete(requests: Sequence[Any], *, what: str, timeout: timedelta) -> None:
    """Wait for MPI requests. After `timeout`, raise a RuntimeError: `what` has not finished.

    MPI's own wait is not used: it has no time limit, it blocks Python's signal handlers, and it keeps a core busy that another
    rank of an oversubscribed machine could use.
    """
    test_all, limit_s = library().Request.Testall, timeout.total_seconds()
    started_at = time.monotonic()
    while not test_all(requests):
        waited = time.monotonic() - started_at
        if waited > limit_s:
            raise RuntimeError(f"{what} has not finished in launch.timeout_s={limit_s:g}: a rank is late or has ended")
        time.sleep(min(waited / 10, 0.0005))


def leave() -> None:
    """End MPI. Collective: mpirun kills the others when one rank exits, so a rank continues only when all have called this."""
    if not library().Is_finalized():
        library().Finalize()
