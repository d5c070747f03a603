"""The process groups of a run: the stores through which the ranks meet, the groups, and the actions at the end."""

import functools
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from framework.runtime.environment import Environment
from framework.runtime.exits import Interrupted, RunEnded
from framework.runtime.forks import comes_true, start_in_thread
from framework.runtime.preemption import PREEMPTION
from framework.runtime.torch_internals import NCCL_LATER, set_group_timeout

_TO_END_S = 20.0  # between the first rank that reaches the end of a run, and the last


@dataclass
class Groups:
    """One rank's membership in the default process group, which training uses, and in the groups that are made from it."""

    backend: str
    _: KW_ONLY
    rank: int
    world_size: int
    timeout: timedelta
    device: torch.device | None = None  # the only device that NCCL uses in this process, if known
    _store: dist.Store = field(default_factory=dist.HashStore, init=False)
    _at_end: list[tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=list, init=False)

    def join(self, store: dist.Store) -> None:
        """Join the default group. Collective."""
        self._store = store
        set_group_timeout(self.timeout)
        # with its device, NCCL connects the ranks immediately, and splits this connection for each axis of a mesh; without it,
        # the ranks of each axis would meet through the store
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.world_size, timeout=self._timeout, device_id=self.device
        )

    def new_group(self) -> dist.ProcessGroup:
        """Return a group of all ranks for training. Its collectives never pair with those of other groups. Collective."""
        return dist.new_group(backend=self.backend, timeout=self._timeout)

    @property
    def _timeout(self) -> timedelta:
        return self.timeout + NCCL_LATER if "nccl" in self.backend else self.timeout

    def store(self, name: str) -> dist.Store:
        """Return a part of this attempt's store with keys that nothing else uses. Collective."""
        return dist.PrefixStore(name, self._store)

    def at_end(self, *, leave: Callable[[], None], abandon: Callable[[], None]) -> None:
        """Register an action for the end: `leave` when every rank is done and still answers, `abandon` if this rank fails."""
        self._at_end.append((leave, abandon))

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """Turn the end of a run into a failure if only this rank reaches it: the others would wait for it.

        A signal may reach the ranks at different times.
        """
        try:
            yield
        except Interrupted:
            raise
        except RunEnded as end:
            self._store.add("ended", 1)
            if not comes_true(lambda: self._store.add("ended", 0) >= self.world_size, within_s=_TO_END_S):
                raise RuntimeError(str(end)) from end
            raise

    def leave(self) -> None:
        """Run the `leave` actions, the last one first. Collective."""
        while self._at_end:
            self._at_end.pop()[0]()

    def abandon(self) -> None:
        """Run the `abandon` actions. Ranks that wait for this rank's answer learn that no answer will come."""
        while self._at_end:
            self._at_end.pop()[1]()


def attempt_store(environment: Environment, *, scratch: Path | None, timeout: timedelta) -> dist.Store:
    """Return this attempt's store. The next attempt must not see the keys of a failed attempt: gloo would hang."""
    if scratch is not None and not environment.uses_agent_store:
        return dist.FileStore(str(scratch / f"store_{environment.attempt}"), environment.world_size)
    return launcher_store(environment, timeout=timeout, part="attempt")


def launcher_store(environment: Environment, *, timeout: timedelta, part: str) -> dist.Store:
    """Return a part of the launcher's TCP store. Rank 0 starts the store if it does not exist. Collective."""
    if environment.uses_agent_store:  # the store lives longer than an attempt, but each torchrun counts its own restarts
        part = f"{part}_{environment.attempt}"
    with _ONE_AT_A_TIME:  # two threads of rank 0 must not both start the store
        store = _tcp_store(environment)
    store.set_timeout(timeout)
    return dist.PrefixStore(part, store)


def serve_store(host: str, *, ports: Iterable[int] = (0,)) -> tuple[dist.Store, int]:
    """Serve a store on the first free port of `ports` (0: any port). Return the store and the port.

    `host` is an address of this host; empty: all addresses. The server lives as long as the returned object. Raise OSError if
    no port is free.
    """
    fault: OSError | None = None
    every = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
    for port in ports:
        try:
            how = every if not host else {"family": socket.AF_INET6 if ":" in host else socket.AF_INET}
            listener = socket.create_server((host, port), **how)  # type: ignore[arg-type]
        except OSError as error:
            fault = error
            continue
        port = listener.getsockname()[1]
        # open the socket here: TCPStore's own socket listens on every network (pytorch#173909)
        store = dist.TCPStore(
            host or "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return store, port
    raise fault or OSError("no port for the store")


def connect_store(host: str, port: int, *, silent_s: float) -> dist.Store:
    """Return a store that another process serves. Its methods raise RuntimeError if they get no answer within `silent_s`."""
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=silent_s))
    for connection in _connections(port):  # torch would wait for the answer of a lost host forever
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", math.ceil(silent_s), 0))
    return store


def hang_up(port: int) -> None:
    """End this process's connections to a store that does not answer. A thread that waits for an answer waits no longer."""
    for connection in _connections(port):
        with suppress(OSError):  # it has ended already
            connection.shutdown(socket.SHUT_RDWR)


def _connections(port: int) -> Iterator[socket.socket]:
    """Yield this process's connections to a port of another host, or of this one."""
    for entry in psutil.Process().net_connections("tcp"):
        if entry.raddr and entry.raddr.port == port:
            with socket.socket(fileno=os.dup(entry.fd)) as connection:
                yield connection


def awaited(store: dist.Store, key: str, *, timeout: timedelta, sign: str | None = None) -> bytes:
    """Wait until a key exists, and return its value. As long as the number `sign` grows, another process works for it.

    Raise Interrupted if a signal arrives (C++ code would not notice the signal), or after `timeout`.
    """
    poll(lambda: store.check([key]), timeout=timeout, sign=lambda: sign and store.add(sign, 0))
    return bytes(store.get(key))


def poll(is_there: Callable[[], bool], *, timeout: timedelta, sign: Callable[[], object] = lambda: None) -> None:
    began, before = time.monotonic(), sign()
    while not is_there():
        waited = time.monotonic() - began
        if PREEMPTION.requested:
            raise Interrupted("stopped before all processes had started; the same command starts again")
        if waited > timeout.total_seconds():
            if (now := sign()) == before:
                raise Interrupted(
                    f"not all processes of the run have started within {waited:.0f} s; the same command tries again"
                )
            began, before = time.monotonic(), now
        time.sleep(min(0.5, 0.01 + waited / 20))  # a thousand processes may poll


_ONE_AT_A_TIME = threading.Lock()


@functools.cache  # rank 0 serves the store until its process ends: other ranks may still need it
def _tcp_store(environment: Environment) -> dist.Store:
    """Return the store at the launcher's address, which rank 0 serves unless the launcher does.

    In a Slurm step, other jobs on the node may use the port: rank 0 takes the first free port of some, and the others look for
    the store that contains the step's name.
    """
    step, timeout = environment.step, timedelta(minutes=10)
    ports = range(environment.master_port, environment.master_port + (_NUM_PORTS if step else 1))
    is_alone = environment.local_world_size == environment.world_size and not environment.uses_agent_store
    host = "127.0.0.1" if is_alone else environment.master_addr
    if environment.rank == 0 and not environment.uses_agent_store:
        store, _ = serve_store("127.0.0.1" if is_alone else "", ports=ports)
        store.set_timeout(timeout)
        store.set(step or "served", "")
        return store
    found: list[int] = []

    def is_there() -> bool:
        found.extend(port for port in ports if not found and _listens(host, port) and (not step or _is_of(step, host, port)))
        return bool(found)

    poll(is_there, timeout=timeout)
    return dist.TCPStore(host, found[0], is_master=False, timeout=timeout, wait_for_workers=False)


_NUM_PORTS = 20


def _is_of(step: str, host: str, port: int) -> bool:
    """Return whether a port serves the store of a step. Another program's server may never answer: ask it in a thread."""
    answer = start_in_thread(lambda: connect_store(host, port, silent_s=_TO_ANSWER_S).check([step]), name="step", daemon=True)
    return bool(wait([answer], timeout=2 * _TO_ANSWER_S).done) and answer.exception() is None and bool(answer.result())


_TO_ANSWER_S = 2.0


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
