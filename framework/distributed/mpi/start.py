"""MPI, through mpi4py: what the processes that mpirun has started agree on, and how they end."""

import functools
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from framework.runtime.environment import Environment, variables
from framework.runtime.problem import Problem, install_command, missing

if TYPE_CHECKING:
    from torch.distributed import Store

INSTALL = install_command("mpi")


def refusal(*, num_processes: Any, is_torchs: bool) -> Problem | None:
    """Return why a run of this many processes cannot have backend=mpi. `is_torchs`: torch was built with MPI."""
    if not is_torchs and missing("mpi"):
        what = "mpi is not in this PyTorch build, and mpi4py, which can replace it, is not installed"
        return Problem("backend", what, f"{INSTALL}, or a PyTorch compiled from source where an MPI library is installed")
    if isinstance(num_processes, int) and num_processes > 1 and not Environment.read().uses_mpi:
        what = f"mpi, but mpirun did not start these {num_processes} processes"
        return Problem("backend", what, f"mpirun -n {num_processes} python train.py ..., without launch.nproc_per_node")
    return None


@functools.cache
def library() -> Any:
    """Return mpi4py's MPI module, and start MPI. Raise RuntimeError if MPI cannot start."""
    import mpi4py

    environment = Environment.read()
    if environment.local_world_size == environment.world_size:
        variables().setdefault("OMPI_MCA_btl", "^tcp")  # Open MPI's TCP would listen on every network; memory is shared here
    # MPI_Finalize waits for every rank: a failed rank must not wait, because the others wait for it
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py is installed, but no MPI library
        raise RuntimeError(f"mpi4py cannot start MPI: {' '.join(str(error).split())} ({INSTALL})") from error
    return MPI


def problem(environment: Environment) -> Problem | None:
    """Return why this process, which mpirun has started, cannot meet the others. This starts MPI. Collective."""
    count = environment.world_size
    if missing("mpi"):
        what = f"started {count} processes, which connect through mpi4py, and mpi4py is not installed"
        return Problem("mpirun", what, f"{INSTALL}, or torchrun --nproc-per-node={count} train.py ...")
    try:
        world = library().COMM_WORLD
    except RuntimeError as error:
        return Problem("mpirun", str(error))
    if (world.rank, world.size) == (environment.rank, count):
        return None
    what = f"started {count} processes, but mpi4py's MPI sees {world.size}: mpirun and mpi4py are from different installations"
    return Problem("mpirun", what, f"take both from one: {INSTALL} brings both")


@functools.cache
def placed(environment: Environment) -> Environment:
    """Return the environment, with this process's place among the processes that share its node's memory. Collective.

    mpirun may number a node's processes in another order than their ranks, and a node's ranks may have gaps.
    """
    MPI = library()
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    first = node.bcast(world.rank, root=0)
    return replace(environment, local_rank=node.rank, local_world_size=node.size, first_on_node=first)


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


def from_rank_0(text: str | None, *, timeout: timedelta) -> str:
    """Return rank 0's text on every rank. Collective."""
    world = library().COMM_WORLD
    # rank 0 has its text when it enters the barrier; so the broadcast, which has no time limit, waits for no rank
    complete([world.Ibarrier()], what="MPI: rank 0's decision", timeout=timeout)
    return str(world.bcast(text))


@functools.cache
def store(*, timeout: timedelta) -> "Store":
    """Return the store through which gloo's ranks meet. Rank 0 serves it at a free port, and sends the port. Collective."""
    from torch.distributed import TCPStore

    world = library().COMM_WORLD
    one_machine = placed(Environment.read()).local_world_size == world.size
    listener, address = None, None
    if world.rank == 0:
        # open the socket here: TCPStore's own socket listens on every network, even for 127.0.0.1 (pytorch#173909)
        listener = socket.create_server(("127.0.0.1" if one_machine else "", 0))
        address = f"{'127.0.0.1' if one_machine else socket.gethostname()} {listener.getsockname()[1]}"
    host, _, port = from_rank_0(address, timeout=timeout).partition(" ")
    served = {"is_master": True, "master_listen_fd": listener.detach()} if listener else {"is_master": False}
    return TCPStore(host, int(port), world.size, wait_for_workers=False, timeout=timeout, **served)


def leave() -> None:
    """End MPI. Collective: mpirun kills the others when one rank exits, so a rank continues only when all have called this."""
    if not library().Is_finalized():
        library().Finalize()
