"""The world: which process this is, on which device, and what connects it with the others."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from framework.distributed.agreement import Agreement
from framework.distributed.buckets import broadcast_all
from framework.distributed.devices import devices_of, require_one_kind
from framework.distributed.groups import Groups, attempt_store
from framework.distributed.hang import diagnose
from framework.distributed.hang.board import Board
from framework.distributed.mesh import resolve_axes
from framework.distributed.mpi import start as mpi
from framework.distributed.mpi.group import backend_name as mpi_backend
from framework.distributed.other_backend import kinds_of_devices
from framework.runtime.environment import Environment, variables
from framework.runtime.exits import Unfit
from framework.runtime.torch_internals import num_operations


@dataclass(frozen=True)
class World:
    """One process's view of the run. Built by `start`; every method marked collective is called by every rank.

    Training uses `groups`; over `agreement` the framework itself agrees on what to do next.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    first_on_node: int  # the rank whose local_rank is 0 on this node
    devices: list[torch.device]  # of this process alone
    timeout: timedelta
    groups: Groups
    agreement: Agreement
    board: Board | None  # of the ranks on this node

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
        backend_module: str | None = None,
        timeout_s: float,
        scratch: Path | None,
        device: str = "cpu",
        num_devices: int | None = 1,
        board: Board | None = None,
    ) -> "World":
        """Join the run's process groups. Collective. Unfit, on every rank, where the devices are not there.

        `backend_module` is what to import for a back end of another package; the framework itself agrees over gloo then.
        `device` is cpu, cuda, or auto: CUDA's where there are any. `num_devices` of them are this process's, None: all that
        it sees. `scratch` is a folder, which all ranks see, for a file store of this attempt.
        """
        rank, world_size, timeout = environment.rank, environment.world_size, timedelta(seconds=timeout_s)
        uses_mpi = backend == "mpi" and world_size > 1  # one process starts no MPI, which leaves files without mpirun
        place = mpi.placed(environment) if environment.uses_mpi else environment
        devices = devices_of(place, device=device, num_devices=num_devices)
        control_backend = default_backend = mpi_backend() if uses_mpi else "gloo"
        if devices[0].type == "cuda":
            torch.cuda.set_device(devices[0])
            default_backend = f"cpu:gloo,cuda:{'nccl' if backend == 'auto' else backend}"
        if backend_module is not None:
            default_backend = _other_backend(backend, module=backend_module, kind=devices[0].type)
        only = devices[0] if "nccl" in default_backend and len(devices) == 1 else None
        groups, control = Groups(default_backend, rank=rank, world_size=world_size, timeout=timeout, device=only), None
        if world_size > 1:
            if world_size == place.local_world_size:
                variables().setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else needs to reach us
            # a rank connects to the ranks that it speaks to, not to all of them in each group, and asks the store for no others
            variables().setdefault("TORCH_GLOO_LAZY_INIT", "1")
            # MPI's ranks know each other, and torch asks for a store only to have one
            store = dist.HashStore() if uses_mpi else attempt_store(environment, scratch=scratch, timeout=timeout)
            if not uses_mpi:
                require_one_kind(devices[0].type, store, world_size=world_size, timeout=timeout)
            groups.join(store)
            control = dist.new_group(backend=control_backend, timeout=timeout)
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            first_on_node=place.first_on_node,
            devices=devices,
            timeout=timeout,
            groups=groups,
            agreement=Agreement(control),
            board=board,
        )

    @classmethod
    def alone(cls) -> "World":
        """Return the world of this process, on the CPU."""
        return cls.start(Environment(), backend="gloo", timeout_s=30.0, scratch=None)

    def stop(self) -> None:
        """Leave the process groups. The model's wrapper and the optimizer must be gone, or exit can hang (pytorch#56297)."""
        self.groups.abandon()
        self.agreement.finish()
        if dist.is_initialized():
            dist.destroy_process_group()

    def with_own_agreement(self) -> "World":
        """Return this world for a thread, whose collectives must not pair with those of other threads. Collective."""
        group = self.agreement.group
        own = group and dist.new_group(backend=dist.get_backend(group), timeout=self.timeout)
        return dataclasses.replace(self, agreement=Agreement(own))

    # --- what a strategy needs

    def mesh(self, **axes: int | None) -> DeviceMesh:
        """Return the device mesh with these axes, outermost first; at most one None takes what is left. Collective."""
        if not dist.is_initialized():  # a strategy that needs groups, in a world of one
            self.groups.join(dist.HashStore())
        sizes = resolve_axes(axes, world_size=self.world_size)
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite every rank's tensors by rank 0's. Collective."""
        if self.world_size > 1:
            broadcast_all({0: tensors})

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
        """Return how many operations this rank has started on the default and the agreement's group; only gloo counts them."""
        if self.agreement.group is None or self.groups.backend != "gloo":
            return 0, 0
        assert dist.group.WORLD is not None
        return num_operations(dist.group.WORLD), num_operations(self.agreement.group)


def _other_backend(name: str, *, module: str, kind: str) -> str:
    """Return torch's description of the back end that a package registers, for a kind of devices. Unfit if it is not there."""
    try:
        kinds = kinds_of_devices(name, module=module)
    except ValueError as error:
        raise Unfit(f"backend.name: {error}") from error
    if kind not in kinds:
        raise Unfit(f"backend.name: {name} of {module} is for {', '.join(kinds)}, and here it is {kind} (device={kinds[0]})")
    return f"cpu:{name}" if kind == "cpu" else f"cpu:gloo,{kind}:{name}"
