"""The process groups of a run: through which stores its ranks meet, joined once, left once, and what is built on them."""

import functools
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from framework.distributed.mpi import start as mpi
from framework.runtime.environment import Environment
from framework.runtime.torch_internals import set_group_timeout


@dataclass(kw_only=True)
class Groups:
    """One rank's membership in the default process group, which training uses, and in those made from it."""

    rank: int
    world_size: int
    one_machine: bool
    backend: str
    timeout: timedelta
    _store: dist.Store | None = field(default=None, init=False)
    _at_end: list[tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=list, init=False)

    def join(self, store: dist.Store) -> None:
        """Join the default group. Collective."""
        self._store = store
        set_group_timeout(self.timeout)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.world_size, timeout=self.timeout)

    def new_group(self) -> dist.ProcessGroup:
        """Return a group of all ranks of its own, whose collectives pair with no others'. Collective."""
        return dist.new_group(backend=self.backend, timeout=self.timeout)

    def store(self, name: str) -> dist.Store:
        """Return a part of this attempt's store, whose keys nothing else uses. Collective."""
        if isinstance(self._store, dist.HashStore):  # over MPI, which has none to share
            self._store = mpi.store(one_machine=self.one_machine, timeout=self.timeout)
        assert self._store is not None
        return dist.PrefixStore(name, self._store)

    def at_end(self, *, leave: Callable[[], None], abandon: Callable[[], None]) -> None:
        """Call `leave` when every rank is done, while all still answer; `abandon` instead where this rank has failed."""
        self._at_end.append((leave, abandon))

    def leave(self) -> None:
        """End what the ranks do for each other, all being well. Collective."""
        while self._at_end:
            self._at_end.pop()[0]()

    def abandon(self) -> None:
        """End it where this rank has failed: ranks that wait for an answer learn that none will come."""
        while self._at_end:
            self._at_end.pop()[1]()


def attempt_store(environment: Environment, *, scratch: Path | None, timeout: timedelta) -> dist.Store:
    """Return this attempt's store. Keys of a failed attempt must not be seen by the next: gloo would hang on them."""
    if scratch is not None:
        return dist.FileStore(str(scratch / f"store_{environment.attempt}"), environment.world_size)
    return launcher_store(environment, timeout=timeout, part="attempt")


def launcher_store(environment: Environment, *, timeout: timedelta, part: str) -> dist.Store:
    """Return a part of the launcher's TCP store, which rank 0 starts where there is none. Collective."""
    if environment.uses_mpi:
        one_machine = mpi.place_on_node().local_world_size == environment.world_size
        return dist.PrefixStore(part, mpi.store(one_machine=one_machine, timeout=timeout))
    if environment.uses_agent_store:  # which outlives an attempt: but each torchrun counts the restarts for itself
        part = f"{part}_{environment.attempt}"
    store = _tcp_store(environment)
    store.set_timeout(timeout)
    return dist.PrefixStore(part, store)


@functools.cache  # rank 0 serves it, so it lives as long as the process: the others may still be asking
def _tcp_store(environment: Environment) -> dist.Store:
    host, port, timeout = environment.master_addr, environment.master_port, timedelta(minutes=10)
    serves = environment.rank == 0 and not environment.uses_agent_store
    listener = None
    if environment.local_world_size == environment.world_size and not environment.uses_agent_store:
        host = "127.0.0.1"
        # a socket of our own: TCPStore's listens to every network, even for 127.0.0.1 (pytorch#173909)
        listener = socket.create_server((host, port)).detach() if serves else None
    return dist.TCPStore(host, port, environment.world_size, is_master=serves, timeout=timeout, master_listen_fd=listener)
