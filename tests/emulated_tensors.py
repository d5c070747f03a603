"""Tensors on a device that this machine has not: their memory is the CPU's, what mixes devices fails as it does on CUDA."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves, tree_map

TYPES = {"emu", "cuda"}  # of devices that are emulated
INSTEAD: list[Callable[..., Any]] = []  # take an operation and its arguments, and may answer for it
AFTER: list[Callable[[list["Emulated"], list["Emulated"]], None]] = []  # see the tensors that it took, and gave
_MAY_CROSS = {"aten::copy_", "aten::_to_copy"}


class Emulated(Tensor):
    """A tensor on an emulated device."""

    stored: Tensor

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

    def tolist(self) -> Any:  # torch's refuses tensors of a subclass; as its own does on a device, this copies, and waits
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"Emulated({self.stored}, {self.device})"


def compute(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the CPU for the emulated device that its arguments are on, if they are all on one."""
    for answer in INSTEAD:
        if (result := answer(operation, *args, **kwargs)) is not NotImplemented:
            return result
    lists = [argument for argument in args if isinstance(argument, (list, tuple)) and argument]
    is_foreach = operation.name().startswith("aten::_foreach_") and len(lists) > 1
    rows = list(zip(*lists)) if is_foreach else [(args, kwargs)]  # tensors that must be on one device
    devices = [_device_of(row, operation) for row in rows]
    emulated = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Emulated)]
    results = operation(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
    known = {id(leaf.stored): leaf for leaf in emulated}
    if is_foreach and results is not None:
        wrapped: Any = [_wrapped(result, device, known) for result, device in zip(results, devices)]
    else:
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else devices[0]
        wrapped = tree_map(lambda result: _wrapped(result, device, known), results)
    for note in AFTER:
        note(emulated, [leaf for leaf in tree_leaves(wrapped) if isinstance(leaf, Emulated)])
    return wrapped


def _device_of(row: Any, operation: Any) -> torch.device | None:
    """Return the emulated device of these arguments, if there is one. RuntimeError if they are on several."""
    tensors = [leaf for leaf in tree_leaves(row) if isinstance(leaf, Tensor)]
    if operation.name() in _MAY_CROSS:
        return tensors[0].device
    is_strict = "_fused_" in operation.name()  # takes not even a number from the CPU
    devices = {tensor.device for tensor in tensors if tensor.ndim > 0 or isinstance(tensor, Emulated) or is_strict}
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {sorted(map(str, devices))} "
                           f"in {operation.name()}")  # fmt: skip
    return next(iter(devices), None)


def on_cpu(value: Any) -> Any:
    """Return the tensor behind an emulated one, and the CPU for an emulated device; anything else as it is."""
    if isinstance(value, Emulated):
        return value.stored
    return torch.device("cpu") if isinstance(value, torch.device) and value.type in TYPES else value


def _wrapped(result: Any, device: torch.device | None, known: dict[int, Emulated]) -> Any:
    """Return a result as a tensor of the device; the argument itself that an operation in place has changed."""
    if id(result) in known:
        return known[id(result)]
    is_emulated = isinstance(result, Tensor) and device is not None and device.type in TYPES
    return Emulated(result, device) if is_emulated else result


LIBRARIES: list[torch.library.Library] = []


def emulate(key: str) -> None:
    """Let this dispatch key's operations be computed here."""
    fallback, arange = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(lambda operation, *args, **kwargs: compute(operation, *args, **kwargs), key)
    for variant in ("arange", "arange.start", "arange.start_step"):
        arange.impl(variant, _arange, key)  # its general kernel makes a tensor grow, which a wrapper cannot
    LIBRARIES.extend([fallback, arange])


def _arange(*bounds: float, device: Any = None, **options: Any) -> Tensor:
    return Emulated(torch.arange(*bounds, dtype=options.get("dtype")), torch.device(device))


class GlooForEmulated(dist.ProcessGroup):
    """What training asks of a process group, for tensors on emulated devices."""

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


class Done(dist.Work):
    """An operation that has ended, with the emulated tensors that it has filled."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        return self._future


def _by_gloo(theirs: str) -> Callable[..., dist.Work]:
    def run(self: GlooForEmulated, *arguments: Any) -> dist.Work:
        work: dist.Work = getattr(self._gloo, theirs)(*tree_map(on_cpu, arguments))
        if theirs in ("send", "recv"):  # the other side may be about to send first
            return work
        work.wait()
        return Done(arguments[0] if arguments else None)

    return run


for _name in ("allreduce", "reduce", "broadcast", "allgather", "gather", "scatter", "reduce_scatter", "alltoall", "barrier",
              "send", "recv"):  # fmt: skip
    setattr(GlooForEmulated, _name, _by_gloo(_name))
for _name, _theirs in {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "_allgather_base": "_allgather_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "alltoall_base": "alltoall_base",
}.items():
    setattr(GlooForEmulated, _name, _by_gloo(_theirs))


_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _functional(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer for the collectives that DTensor uses, which name their group."""
    if operation.namespace != "_c10d_functional":
        return NotImplemented
    given = {a.name: value for a, value in zip(operation._schema.arguments, args)} | kwargs
    name, tensor = operation._opname, args[0]
    if "group_name" not in given:  # it has been waited for
        return Emulated(tensor.stored, tensor.device)
    group: Any = distributed_c10d._resolve_process_group(given["group_name"])
    gloo, source = group._gloo, tensor.stored.contiguous()
    size, rest = group.size(), source.shape[1:]
    if name in ("all_reduce", "all_reduce_", "broadcast", "broadcast_"):
        result = tensor.stored if name.endswith("_") else source.clone()
    elif name == "all_gather_into_tensor":
        result = source.new_empty(source.shape[0] * size, *rest)
    elif name == "reduce_scatter_tensor":
        result = source.new_empty(source.shape[0] // size, *rest)
    else:
        result = source.new_empty(sum(given["output_split_sizes"]), *rest)
    options = dist.AllreduceOptions() if name.startswith("all_reduce") else dist.ReduceScatterOptions()
    if "reduce_op" in given:
        options.reduceOp = _REDUCTIONS[given["reduce_op"]]
    if name.startswith("all_reduce"):
        gloo.allreduce([result], options).wait()
    elif name.startswith("broadcast"):
        broadcast = dist.BroadcastOptions()
        broadcast.rootRank = given["src"]
        gloo.broadcast([result], broadcast).wait()
    elif name == "all_gather_into_tensor":
        gloo._allgather_base(result, source).wait()
    elif name == "reduce_scatter_tensor":
        gloo._reduce_scatter_base(result, source, options).wait()
    else:
        gloo.alltoall_base(result, source, given["output_split_sizes"], given["input_split_sizes"]).wait()
    if given.get("reduce_op") == "avg":
        result /= size
    return tensor if name.endswith("_") else Emulated(result, tensor.device)


INSTEAD.append(_functional)
