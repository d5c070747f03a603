"""Tensors that may be shards of larger ones (DTensor), told apart without importing that module, which takes a while."""

from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor

T = TypeVar("T", bound=Tensor)


def by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Group tensors by the mesh that they are spread over, plain ones apart: no operation on many takes a mixture."""
    groups: dict[object, list[T]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of the tensor, sharing its memory, or the tensor itself if it is no shard."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor that this is a shard of, or itself. Collective if it is one."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
