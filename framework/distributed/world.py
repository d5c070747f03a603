"""The world: this process's rank, its devices, and its connections to the other processes."""

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
from framework.distributed.hang.board import OwnBoard
from framework.distributed.mesh import resolve_axes
from framework.distributed.other_backend import kinds_of_devices
from framework.runtime.environment import Environment, variables
from framework.runtime.exits import Unfit


@dataclass(frozen=True)
class World:
    """One process's view of the run. `start` makes it. Every rank must call each method that is marked as collective.

    Training uses `groups`. The framework itself uses `agreement` to agree on the next action.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    devices: list[torch.device]  # the devices of this process only
    timeout: timedelta
    groups: Groups
    agreement: Agreement
    board: OwnBoard | None  # the board of this node's ranks

    @property
    def device(self) -> torch.device:
        """The first device of this process."""
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
        board: OwnBoard | None = None,
    ) -> "World":
        """Join the run's process groups. Collective. Raise Unfit, on every rank, if the devices do not exist.

        `backend_module` is the module of a backend from another package; then the framework itself agrees over gloo. `device`
        is cpu, cuda, or auto (CUDA devices if there are any that the backend supports). `num_devices` of them belong to this
        process (None: all that it sees). `scratch` is a folder of this node, for a file store if all ranks are here.
        """
        rank, world_size, timeout = environment.rank, environment.world_size, timedelta(seconds=timeout_s)
        kinds = None if backend_module is None else _kinds(backend, module=backend_module)
        device = "cpu" if device == "auto" and kinds == ["cpu"] else device
        devices = devices_of(environment, device=device, num_devices=num_devices)
        default_backend = "gloo"
        if devices[0].type == "cuda":
            torch.cuda.set_device(devices[0])
            default_backend = f"cpu:gloo,cuda:{'nccl' if backend == 'auto' else backend}"
        if kinds is not None:
            default_backend = _other_backend(backend, kinds=kinds, kind=devices[0].type)
        only = devices[0] if "nccl" in default_backend and len(devices) == 1 else None
        groups, control = Groups(default_backend, rank=rank, world_size=world_size, timeout=timeout, device=only), None
        if world_size > 1:
            if world_size == environment.local_world_size:
                variables().setdefault("GLOO_SOCKET_IFNAME", "lo")  # other machines need no connection
            # a rank connects only to the ranks that it communicates with, and asks the store for no other ranks
            variables().setdefault("TORCH_GLOO_LAZY_INIT", "1")
            store = attempt_store(environment, scratch=scratch, timeout=timeout)
            require_one_kind(devices[0].type, store, world_size=world_size, timeout=timeout)
            groups.join(store)
            control = dist.new_group(backend="gloo", timeout=timeout)
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=environment.local_rank,
            local_world_size=environment.local_world_size,
            devices=devices,
            timeout=timeout,
            groups=groups,
            agreement=Agreement(control),
            board=board,
        )

    @classmethod
    def alone(cls) -> "World":
        """Return the world of a single process, on the CPU."""
        return cls.start(Environment(), backend="gloo", timeout_s=30.0, scratch=None)

    def stop(self) -> None:
        """Leave the process groups. Delete the model's wrapper and the optimizer before, or exit can hang (pytorch#56297)."""
        self.groups.abandon()
        self.agreement.finish()
        if dist.is_initialized():
            dist.destroy_process_group()

    def with_own_agreement(self) -> "World":
        """Return this world for a thread. Its collectives do not pair with those of other threads. Collective."""
        group = self.agreement.group
        own = group and dist.new_group(backend=dist.get_backend(group), timeout=self.timeout)
        return dataclasses.replace(self, agreement=Agreement(own))

    # --- what a strategy needs

    def mesh(self, **axes: int | None) -> DeviceMesh:
        """Return the device mesh with these axes, outermost first. Collective.

        At most one axis may be None: it gets the remaining size.
        """
        if not dist.is_initialized():  # a strategy needs groups, but the world has one process
            self.groups.join(dist.HashStore())
        sizes = resolve_axes(axes, world_size=self.world_size)
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite every rank's tensors with rank 0's tensors. Collective."""
        if self.world_size > 1:
            broadcast_all({0: tensors})

    # --- what the other ranks on this node see, even if this rank no longer answers

    def at(self, phase: str, *, step: int) -> None:
        """Record what this rank does next."""
        if self.board is not None:
            self.board.beat(phase, step=step)

    def report_error(self, error: Exception) -> None:
        """Record that an error has ended this rank's work. Call this first, because other ranks wait for this record."""
        if self.board is not None:
            diagnose.report_error(self.board, error)


def _kinds(name: str, *, module: str) -> list[str]:
    try:
        return kinds_of_devices(name, module=module)
    except ValueError as error:
        raise Unfit(f"backend.name: {error}") from error


def _other_backend(name: str, *, kinds: Sequence[str], kind: str) -> str:
    """Return torch's description of a package's backend for a kind of device. Raise Unfit if the backend does not fit."""
    if kind not in kinds:
        raise Unfit(f"backend.name: {name} is for {', '.join(kinds)}, but the device is {kind} (device={kinds[0]})")
    return f"cpu:{name}" if kind == "cpu" else f"cpu:gloo,{kind}:{name}"
