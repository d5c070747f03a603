"""Tensors in batches and outputs (trees of tensors), and tensors that may be shards of larger tensors (DTensor)."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)
Tree = Any  # a tensor, or a tuple, list, mapping or dataclass of trees


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Return a tree of the same types with `function` applied to each tensor; other values do not change."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        values = {key: map_tensors(function, value) for key, value in tree.items()}
        return values if type(tree) is dict else _updated(tree, values)
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(function, value) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        new = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(new, field.name, map_tensors(function, getattr(tree, field.name)))
        return new
    return tree


def _updated(mapping: Any, values: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with other values, for example the outputs of a Hugging Face model."""
    new = copy.copy(mapping)
    for key, value in values.items():
        new[key] = value
    return new


def tensors_in(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree, in the order of the tree."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: (found.append(tensor), tensor)[1], tree)  # type: ignore[func-returns-value]
    return found


def first_tensor(tree: Tree) -> Tensor | None:
    """Return the first tensor of a tree, which in a module's outputs is usually the main one; None if there is no tensor."""
    return next(iter(tensors_in(tree)), None)


def call(model: Callable[..., Any], inputs: Tree) -> Any:
    """Call a model: a tensor is its argument, a tuple or list its arguments, a mapping its named arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on a device. A CUDA device reads pinned memory itself; torch keeps the memory until then."""
    is_read = device.type == "cuda" and not tensor.is_pinned()
    return (tensor.pin_memory() if is_read else tensor).to(device, non_blocking=True)


# the widest floating-point format of a kind of device: float64, but float32 on Apple's GPUs
WIDEST: defaultdict[str, torch.dtype] = defaultdict(lambda: torch.float64, mps=torch.float32)


# --- the order of the dims in memory: it decides how a kernel sums


def order_of(tensor: Tensor) -> list[int]:
    """Return the dims of a plain, dense tensor from the largest stride to the smallest; of any other, as if contiguous."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    is_dense = not hasattr(tensor, "device_mesh") and tensor.permute(order).is_contiguous()
    return order if is_dense and not tensor.is_contiguous() else [*range(tensor.ndim)]


def in_order(tensor: Tensor, order: list[int]) -> Tensor:
    """Return a copy of a plain tensor with this order of its dims in memory; the tensor itself if it has it, or cannot."""
    if hasattr(tensor, "device_mesh") or sorted(order) != [*range(tensor.ndim)] or order == order_of(tensor):
        return tensor
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute([*map(order.index, range(len(order)))])


# --- shards, recognised without an import of DTensor's module, which takes long


def by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Group tensors by the mesh of their shards, and plain tensors in a group: operations on many tensors accept no mixture."""
    groups: dict[object, list[T]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of the tensor, which shares its memory; or the tensor itself if it is not a shard."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def with_part(shard: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that is cut like `shard` and has `part` on this rank; `part` itself if `shard` is not a shard."""
    if not hasattr(shard, "device_mesh"):
        return part
    kind: Any = type(shard)
    placed: Any = shard
    return kind.from_local(  # type: ignore[no-any-return]
        part, placed.device_mesh, placed.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )


def part_of(whole: Tensor, *, like: Tensor) -> Tensor:
    """Return `whole`, which every rank must have, cut like `like`; unchanged if `like` is not a shard. Nothing is sent."""
    if not hasattr(like, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    replicated = DTensor.from_local(whole, like.device_mesh, run_check=False)
    return replicated.redistribute(like.device_mesh, like.placements)


def whole_like(like: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor that every rank has as a tensor on the mesh of `like`; without a mesh, or for a number, unchanged."""
    if not hasattr(like, "device_mesh") or tensor.ndim == 0:
        return tensor
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(tensor.to(like.device), like.device_mesh, run_check=False)


def gradient_of(parameter: Any) -> Tensor | None:
    """Return the gradient, cut like its parameter: tensor parallelism leaves some gradients as pending sums."""
    gradient = parameter.grad
    if gradient is not None and getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return gradient


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a shard, or the tensor itself. Collective for a shard."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
