"""The world: which process this is, on which device, and the collectives that all of them take part in."""

import dataclasses
import functools
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from framework.distributed.hang import diagnose as hang
from framework.distributed.hang.board import Board
from framework.distributed.mesh import resolve_axes
from framework.distributed.mpi import start as mpi
from framework.distributed.mpi.group import backend_name as mpi_backend
from framework.runtime.environment import Environment, Place, set_default
from framework.runtime.exits import DiskFailed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class World:
    """One process's view of the run. Built by `start`; every method marked collective is called by every rank.

    Training collectives use the default process group. What the framework itself agrees on (stop flags, checkpoint
    plans, metric sums) goes over `control`, a group of its own, so that it never pairs with a gradient: a gloo group, but
    over MPI where the training is, for a cluster may let nothing else through.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    attempt: int
    first_on_node: int  # the rank whose local_rank is 0 on this node
    device: torch.device
    devices: list[torch.device]  # of this process alone; the first is `device`
    backend: str
    timeout: timedelta
    control_backend: str
    board: Board | None = None  # of the ranks on this node
    control: dist.ProcessGroup | None = None
    _flags: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    _store: dist.Store | None = None
    _at_end: list[tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=list)

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

        `num_devices` are this process's, None: all that there are; a CPU is one. `scratch` is a folder, which all
        ranks see, for a file store of this attempt.
        """
        if environment.world_size == 1 and backend == "mpi":
            backend = "gloo"  # nobody to talk to: MPI need not be started, which leaves files behind without mpirun
        place = mpi.place_on_node() if environment.uses_mpi else Place.of(environment)
        use_cuda = backend in ("auto", "nccl") and torch.cuda.is_available()
        devices = _cuda_devices(place.local_rank, num_devices) if use_cuda else [torch.device("cpu")]
        world = cls(
            rank=environment.rank,
            local_rank=place.local_rank,
            world_size=environment.world_size,
            local_world_size=place.local_world_size,
            attempt=environment.attempt,
            first_on_node=place.first_on_node,
            device=devices[0],
            devices=devices,
            backend="cpu:gloo,cuda:nccl" if use_cuda else mpi_backend() if backend == "mpi" else "gloo",
            control_backend=mpi_backend() if backend == "mpi" else "gloo",
            timeout=timedelta(seconds=timeout_s),
            board=board,
        )
        if use_cuda:
            torch.cuda.set_device(world.device)
        # torch.distributed.checkpoint, of what one process asks for
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        if world.world_size > 1:
            if world.world_size == world.local_world_size:
                set_default("GLOO_SOCKET_IFNAME", "lo")  # one machine: nobody else needs to reach us
            alone = backend == "mpi"  # MPI's ranks know each other, and torch asks for a store only to have one
            world._join(dist.HashStore() if alone else _store(environment, scratch=scratch, timeout=world.timeout))
        return world

    def _join(self, store: dist.Store) -> None:
        self._store = store
        # torch gives the groups of a mesh half an hour, and takes no other time for them
        distributed_c10d.default_pg_timeout = self.timeout
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.world_size, timeout=self.timeout
        )
        if self.world_size > 1:
            self.control = dist.new_group(backend=self.control_backend, timeout=self.timeout)

    def mesh(self, **axes: int | None) -> "DeviceMesh":
        """Return the device mesh with these axes, outermost first; at most one None takes what is left. Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():  # a strategy that needs groups, in a world of one
            self._join(dist.HashStore())
        sizes = resolve_axes(axes, world_size=self.world_size)
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def new_group(self) -> dist.ProcessGroup:
        """Return a group of all ranks of its own, whose collectives pair with no others'. Collective."""
        return dist.new_group(backend=self.backend, timeout=self.timeout)

    def store(self, name: str) -> dist.Store:
        """Return a part of this attempt's store, whose keys nothing else uses. Collective."""
        if isinstance(self._store, dist.HashStore):  # over MPI, which has none to share
            self._store = mpi.store(one_machine=self.world_size == self.local_world_size, timeout=self.timeout)
        assert self._store is not None
        return dist.PrefixStore(name, self._store)

    def at_end(self, *, leave: Callable[[], None], abandon: Callable[[], None]) -> None:
        """Have `leave` run when every rank is done, while all still answer; `abandon` instead where this rank has failed."""
        self._at_end.append((leave, abandon))

    def at(self, phase: str, *, step: int) -> None:
        """Note where this rank stands, for the others: they read it when it does not answer any more."""
        if self.board is not None:
            self.board.beat(phase, step=step, collectives=self._collectives())

    def tell(self, error: Exception) -> None:
        """Note that this rank's work has ended in an error: before anything that takes time, for others look for it."""
        if self.board is not None:
            hang.tell(self.board, error, collectives=self._collectives())

    def _collectives(self) -> tuple[int, int]:
        """Return how many operations this rank has begun on the default group and on `control`; only gloo counts them."""
        if self.control is None or self.backend != "gloo":
            return 0, 0
        assert dist.group.WORLD is not None
        groups: tuple[Any, Any] = (
            dist.group.WORLD,
            self.control,
        )  # torch declares their counters no more than its own use of them
        return groups[0]._get_sequence_number_for_group(), groups[1]._get_sequence_number_for_group()

    def leave(self) -> None:
        """End what the ranks do for each other, all being well. Collective."""
        while self._at_end:
            self._at_end.pop()[0]()

    def stop(self) -> None:
        """Leave the process groups. The model's wrapper and the optimizer must be gone: exit can hang otherwise (pytorch#56297)."""
        while self._at_end:  # first of all: ranks that wait for an answer learn that none will come
            self._at_end.pop()[1]()
        for work, _ in self._flags:
            work.wait()
        self._flags.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite every rank's tensors by rank 0's. Collective."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def send(self, value: Tensor, *, to: int) -> None:
        """Send a CPU tensor to one rank, which calls `receive`."""
        dist.send(value, dst=to, group=self.control)

    def receive(self, value: Tensor, *, source: int) -> Tensor:
        """Overwrite a CPU tensor by what `source` sends, and return it."""
        dist.recv(value, src=source, group=self.control)
        return value

    def sum(self, values: Tensor) -> Tensor:
        """Sum a CPU tensor over all ranks, in place. Collective."""
        if self.control is not None:
            dist.all_reduce(values, group=self.control)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank. Collective."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_rank_0(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank. Collective."""
        return self.gather(value)[0]

    def together(self, action: Callable[[], Any], *, what: str, rank_0_only: bool = False) -> list[Any]:
        """Run `action`, which uses the disk, and return every rank's result: no rank is left waiting. Collective.

        DiskFailed on every rank, saying `what` could not be done, where an OSError hits one of them.
        """
        result, fault = None, None
        if not rank_0_only or self.rank == 0:
            try:
                result = action()
            except OSError as error:
                fault = " ".join(str(error).split())
        outcomes = self.gather((result, fault))
        for rank, (_, problem) in enumerate(outcomes):
            if problem is not None:
                raise DiskFailed(f"{what}: rank {rank}: {problem}; the last valid checkpoint is intact")
        return [value for value, _ in outcomes]

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def among(self) -> dict[str, Any]:
        """Return the arguments by which torch.distributed.checkpoint works among these ranks, or in one process alone."""
        return {"process_group": self.control, "no_dist": self.control is None}

    @property
    def allows_threads(self) -> bool:
        """Return whether collectives may run beside others, in a thread: an MPI need not allow that."""
        return self.control_backend == "gloo"

    def beside(self) -> "World":
        """Return this world with a control group of its own, so that a thread's collectives pair with no others'. Collective."""
        if self.control is None:
            return self
        control = dist.new_group(backend=self.control_backend, timeout=self.timeout)
        return dataclasses.replace(self, control=control, _flags=[], _at_end=[])

    def any_flags(self, *flags: bool) -> list[bool]:
        """Return for each flag whether any rank had raised it at the PREVIOUS call: the same on all ranks. Collective.

        The reduction of one call runs beside the step that follows it, so agreeing costs no waiting.
        """
        if self.control is None:
            return list(flags)
        before = [False] * len(flags)
        if self._flags:
            work, seen = self._flags.pop()
            work.wait()
            before = [bool(count) for count in seen.tolist()]
        mine = torch.tensor(flags, dtype=torch.int64)
        self._flags.append((dist.all_reduce(mine, group=self.control, async_op=True), mine))
        return before


def _cuda_devices(local_rank: int, num_devices: int | None) -> list[torch.device]:
    count = num_devices or torch.cuda.device_count()
    return [torch.device("cuda", local_rank * count + i) for i in range(count)]


def _store(environment: Environment, *, scratch: Path | None, timeout: timedelta) -> dist.Store:
    """Return this attempt's store. Keys of a failed attempt must not be seen by the next: gloo would hang on them."""
    if scratch is not None:
        return dist.FileStore(str(scratch / f"store_{environment.attempt}"), environment.world_size)
    return launcher_store(environment, timeout=timeout, part="attempt")


def launcher_store(environment: Environment, *, timeout: timedelta, part: str) -> dist.Store:
    """Return a part of the launcher's TCP store; rank 0 starts it where the launcher (not torchrun's agent) has none. Collective."""
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
    return dist.TCPStore(
        host, port, environment.world_size, is_master=serves, timeout=timeout, master_listen_fd=listener
    )
