"""Several devices in one process on a machine that has none: their memory is the CPU's, their rules are CUDA's.

`emu:0`, `emu:1`, ... are torch's PrivateUse1 device, renamed. A tensor there is a wrapper around one on the CPU. What mixes
devices fails as it does on CUDA. To be imported in a process of its own: torch cannot take the name back.
"""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from framework.distributed.groups import Groups
from framework.distributed.world import World


class _Streams(_DummyBackendModule):
    """The device's module, with the one stream that the checkpoint writer asks for."""

    def current_stream(self) -> "_Streams":
        return self

    def synchronize(self) -> None:
        pass

    def stream(self, _: Any) -> Any:
        return nullcontext()


_setup_privateuseone_for_python_backend("emu", backend_module=_Streams())
torch._C._set_multithreading_enabled(False)  # autograd would want a thread of its own for each device
_MAY_CROSS = {"aten::copy_", "aten::_to_copy"}


class Emulated(Tensor):
    """A tensor on an emulated device."""

    @staticmethod
    def __new__(cls, stored: Tensor, device: torch.device) -> "Emulated":
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            stored.shape,
            strides=stored.stride(),
            storage_offset=stored.storage_offset(),
            dtype=stored.dtype,
            device=device,
        )
        wrapper.stored = stored
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(operation, *args, **(kwargs or {}))

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:  # by which Module.to() keeps tied weights tied
        return ["stored"], self.device

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], device: torch.device, size: Any, stride: Any) -> "Emulated":
        return Emulated(inner["stored"], device)

    def __repr__(self, **_: Any) -> str:
        return f"Emulated({self.stored}, {self.device})"


def compute(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the CPU for the emulated device that its arguments are on, if they are all on one."""
    lists = [argument for argument in args if isinstance(argument, (list, tuple)) and argument]
    is_foreach = operation.name().startswith("aten::_foreach_") and len(lists) > 1
    rows = list(zip(*lists)) if is_foreach else [(args, kwargs)]  # tensors that must be on one device
    devices = [_device_of(row, operation) for row in rows]
    results = operation(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
    known = {id(leaf.stored): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Emulated)}
    if is_foreach and results is not None:
        return [_wrapped(result, device, known) for result, device in zip(results, devices)]
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else devices[0]
    return tree_map(lambda result: _wrapped(result, device, known), results)


def _device_of(row: Any, operation: Any) -> torch.device | None:
    """Return the emulated device of these arguments, if there is one. RuntimeError if they are on several."""
    tensors = [leaf for leaf in tree_leaves(row) if isinstance(leaf, Tensor)]
    if operation.name() in _MAY_CROSS:
        return tensors[0].device
    devices = {tensor.device for tensor in tensors if tensor.ndim > 0 or isinstance(tensor, Emulated)}
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {sorted(map(str, devices))} "
                           f"in {operation.name()}")  # fmt: skip
    return next(iter(devices), None)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Emulated):
        return value.stored
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "emu" else value


def _wrapped(result: Any, device: torch.device | None, known: dict[int, Emulated]) -> Any:
    """Return a result as a tensor of the device; the argument itself that an operation in place has changed."""
    if id(result) in known:
        return known[id(result)]
    is_emulated = isinstance(result, Tensor) and device is not None and device.type == "emu"
    return Emulated(result, device) if is_emulated else result


_FALLBACK = torch.library.Library("_", "IMPL")
_FALLBACK.fallback(lambda operation, *args, **kwargs: compute(operation, *args, **kwargs), "PrivateUse1")
_ARANGE = torch.library.Library("aten", "IMPL")  # its general kernel makes a tensor grow, which a wrapper cannot


@torch.library.impl(_ARANGE, "arange.start_step", "PrivateUse1")
def _arange(*bounds: float, device: Any = None, **options: Any) -> Tensor:
    return Emulated(torch.arange(*bounds, dtype=options.get("dtype")), torch.device(device))


for _variant in ("arange", "arange.start"):
    _ARANGE.impl(_variant, _arange, "PrivateUse1")


class _Gloo(dist.ProcessGroup):
    """What DDP asks of a process group, for tensors on emulated devices."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "emu"

    def _set_group_name(self, name: str) -> None:  # C++ keeps a name only with a backend of its own
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        pass

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, *arguments: Any) -> dist.Work:
        return self._gloo.allreduce(*tree_map(_on_cpu, arguments))

    def broadcast(self, *arguments: Any) -> dist.Work:
        return self._gloo.broadcast(*tree_map(_on_cpu, arguments))

    def allgather(self, *arguments: Any) -> dist.Work:
        return self._gloo.allgather(*tree_map(_on_cpu, arguments))


def plant(num_devices: int) -> None:
    """Make every World of this process one with so many emulated devices."""
    dist.Backend.register_backend("emu", _Gloo, devices=["emu"])
    start: Callable[..., World] = World.start
    join = Groups.join

    def emulated_join(self: Groups, store: dist.Store) -> None:
        self.backend = "cpu:gloo,emu:emu"
        join(self, store)

    def emulated_start(*args: Any, **kwargs: Any) -> World:
        world = start(*args, **kwargs)
        first = world.local_rank * num_devices
        return dataclasses.replace(world, devices=[torch.device("emu", first + index) for index in range(num_devices)])

    Groups.join = emulated_join  # type: ignore[method-assign]
    World.start = emulated_start  # type: ignore[method-assign,assignment]
