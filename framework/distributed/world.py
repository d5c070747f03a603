"""The world: which process this is, on which device, and what connects it with the others."""

import dataclasses
import functools
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from framework.distributed.agreement import Agreement
from framework.distributed.hang import diagnose
from framework.distributed.hang.board import Board
from framework.distributed.mesh import resolve_axes
from framework.distributed.mpi import start as mpi
from framework.distributed.mpi.group import backend_name as mpi_backend
from framework.runtime.environment import Environment, set_default
from framework.runtime.torch_internals import num_operations, set_group_timeout


@dataclass(frozen=True)
class World:
    """One process's view of the run. Built by `start`; every method marked collective is called by every rank.

    Training uses the default process group; over `agreement` the framework itself agrees on what to do next.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    first_on_node: int  # the rank whose local_rank is 0 on this node
    devices: list[torch.device]  # of this process alone
    timeout: timedelta
    backend: str  # of the default process group
    agreement: Agreement
    board: Board | None  # of the ranks on this node
    _store: dist.Store
    _at_end: list[tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The first of this process's devices."""
        return self.devices[0]

    @classmethod
    def start(
        cls,
        environment: Environment,
        *,
        backend: str,
        timeout_s: float,
        scratch: Path | None,
        num_devices: int | None = 1,
        board: Board | None = None,
    ) -> "World":
        """Join the run's process groups. Collective.

        `num_devices` are this process's devices, None: all devices of the machine; a CPU is one. `scratch` is a folder,
        which all ranks see, for a file store of this attempt.
        """
        rank, world_size, timeout = environment.rank, environment.world_size, timedelta(seconds=timeout_s)
        uses_mpi = backend == "mpi" and world_size > 1  # one process starts no MPI, which leaves files without mpirun
        place = mpi.placed(environment) if environment.uses_mpi else environment
        devices = _devices(backend, place.local_rank, num_devices)
        control_backend = default_backend = mpi_backend() if uses_mpi else "gloo"
        if devices[0].type == "cuda":
            torch.cuda.set_device(devices[0])
            default_backend = "cpu:gloo,cuda:nccl"
        # torch.distributed.checkpoint warns so where one process asks for it
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        store: dist.Store = dist.HashStore()
        control = None
        if world_size > 1:
            if world_size == place.local_world_size:
                set_default("GLOO_SOCKET_IFNAME", "lo")  # nobody else needs to reach us
            if not uses_mpi:  # MPI's ranks know each other, and torch asks for a store only to have one
                store = attempt_store(environment, scratch=scratch, timeout=timeout)
            _join(store, backend=default_backend, rank=rank, world_size=world_size, timeout=timeout)
            control = dist.new_group(backend=control_backend, timeout=timeout)
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            first_on_node=place.first_on_node,
            devices=devices,
            timeout=timeout,
            backend=default_backend,
            agreement=Agreement(control),
            board=board,
            _store=store,
        )

    def leave(self) -> None:
        """End what the ranks do for each other when all is well: the first half of the end. Collective."""
        while self._at_end:
            self._at_end.pop()[0]()

    def stop(self) -> None:
        """Leave the process groups. The model's wrapper and the optimizer must be gone, or exit can hang (pytorch#56297)."""
        while self._at_end:  # this rank has failed: ranks that wait for its answer learn that none will come
            self._at_end.pop()[1]()
        self.agreement.finish()
        if dist.is_initialized():
            dist.destroy_process_group()

    def at_end(self, *, leave: Callable[[], None], abandon: Callable[[], None]) -> None:
        """Call `leave` when every rank is done, while all still answer; `abandon` instead where this rank has failed."""
        self._at_end.append((leave, abandon))

    def beside(self) -> "World":
        """Return this world with an agreement of its own, so that a thread's collectives pair with no others'. Collective."""
        group = self.agreement.group
        own = group and dist.new_group(backend=dist.get_backend(group), timeout=self.timeout)
        return dataclasses.replace(self, agreement=Agreement(own))

    # --- what a strategy needs

    def mesh(self, **axes: int | None) -> DeviceMesh:
        """Return the device mesh with these axes, outermost first; at most one None takes what is left. Collective."""
        if not dist.is_initialized():  # a strategy that needs groups, in a world of one
            _join(self._store, backend=self.backend, rank=0, world_size=1, timeout=self.timeout)
        sizes = resolve_axes(axes, world_size=self.world_size)
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite every rank's tensors by rank 0's. Collective."""
        for tensor in tensors if self.world_size > 1 else ():
            dist.broadcast(tensor, src=0)

    def new_group(self) -> dist.ProcessGroup:
        """Return a group of all ranks for training, whose collectives pair with no others'. Collective."""
        return dist.new_group(backend=self.backend, timeout=self.timeout)

    def store(self, name: str) -> dist.Store:
        """Return a part of this attempt's store, whose keys nothing else uses. Collective."""
        # a group over MPI has a store that is not shared
        is_shared = not isinstance(self._store, dist.HashStore)
        return dist.PrefixStore(name, self._store if is_shared else mpi.store(timeout=self.timeout))

    # --- what the other ranks on this node see, even if this rank no longer answers

    def at(self, phase: str, *, step: int) -> None:
        """Note what this rank is about to do."""
        if self.board is not None:
            self.board.beat(phase, step=step, collectives=self._collectives())

    def report_error(self, error: Exception) -> None:
        """Note that this rank's work has ended in an error: before anything that takes time, since others look for it."""
        if self.board is not None:
            diagnose.report_error(self.board, error, collectives=self._collectives())

    def _collectives(self) -> tuple[int, int]:
        """Return how many operations this rank has begun on the default group and on the agreement's; only gloo counts them."""
        if self.agreement.group is None or self.backend != "gloo":
            return 0, 0
        assert dist.group.WORLD is not None
        return num_operations(dist.group.WORLD), num_operations(self.agreement.group)


def _join(store: dist.Store, *, backend: str, rank: int, world_size: int, timeout: timedelta) -> None:
    set_group_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _devices(backend: str, local_rank: int, num_devices: int | None) -> list[torch.device]:
    if backend not in ("auto", "nccl") or not torch.cuda.is_available():
        return [torch.device("cpu")]
    count = num_devices or torch.cuda.device_count()
    return [torch.device("cuda", local_rank * count + i) for i in range(count)]


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
