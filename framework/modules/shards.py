"""Tensors that may be shards of larger ones (DTensor), told apart without importing that module, which takes a while."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
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


@torch.no_grad()
def copy_to_host(tensor: Tensor, *, onto: Tensor | None = None) -> Tensor:
    """Return a copy in the CPU's memory, sharded as the tensor is. `onto`, an earlier copy of the same, is overwritten."""
    mine = local(tensor)
    if onto is not None:
        local(onto).copy_(mine)
        return onto
    copy = mine.to("cpu", copy=True)
    if mine is tensor:
        return copy
    shard: Any = tensor
    return type(shard).from_local(
        copy, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )


def part_of(whole: Tensor, *, like: Tensor) -> Tensor:
    """Return `whole`, which every rank has, cut as `like` is; itself if that is no shard. Nothing is sent."""
    if not hasattr(like, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    replicated = DTensor.from_local(whole, like.device_mesh, run_check=False)
    return replicated.redistribute(like.device_mesh, like.placements)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor that this is a shard of, or itself. Collective if it is one."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
