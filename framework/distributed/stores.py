"""The stores through which the ranks of a run meet."""

import functools
import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from framework.distributed.mpi import start as mpi
from framework.runtime.environment import Environment


def attempt_store(environment: Environment, *, scratch: Path | None, timeout: timedelta) -> dist.Store:
    """Return this attempt's store. Keys of a failed attempt must not be seen by the next: gloo would hang on them."""
    if scratch is not None:
        return dist.FileStore(str(scratch / f"store_{environment.attempt}"), environment.world_size)
    return launcher_store(environment, timeout=timeout, part="attempt")


def launcher_store(environment: Environment, *, timeout: timedelta, part: str) -> dist.Store:
    """Return a part of the launcher's TCP store, which rank 0 starts where there is none. Collective."""
    if environment.uses_mpi:
        return dist.PrefixStore(part, mpi.store(timeout=timeout))
    if environment.uses_agent_store:  # it outlives an attempt, but each torchrun counts the restarts for itself
        part = f"{part}_{environment.attempt}"
    store = _tcp_store(environment)
    store.set_timeout(timeout)
    return dist.PrefixStore(part, store)


@functools.cache  # rank 0 serves it, so it lives as long as the process: other ranks may still be asking
def _tcp_store(environment: Environment) -> dist.Store:
    host, port, timeout = environment.master_addr, environment.master_port, timedelta(minutes=10)
    serves = environment.rank == 0 and not environment.uses_agent_store
    listener = None
    if environment.local_world_size == environment.world_size and not environment.uses_agent_store:
        host = "127.0.0.1"
        # a socket of our own: TCPStore's listens to every network, even for 127.0.0.1 (pytorch#173909)
        listener = socket.create_server((host, port)).detach() if serves else None
    return dist.TCPStore(host, port, environment.world_size, is_master=serves, timeout=timeout, master_listen_fd=listener)
