"""Many tensors in few messages: one collective per 25 MB, not one per tensor."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from framework.runtime.torch_internals import copy_all

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
_BUCKET = 25 * 2**20  # bytes, as in DistributedDataParallel
UNDER_WAY = 2  # messages at the same time: their memory is needed in addition to the tensors


def sum_all(tensors: Iterable[Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """Sum each tensor over the ranks of a group, in place. Collective. All ranks give the same shapes in the same order."""
    begin = partial(dist.all_reduce, group=group, async_op=True)
    _send((bucket, begin) for bucket in buckets_of(tensors))


def broadcast_all(of_ranks: Mapping[int, Iterable[Tensor]], *, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite every rank's tensors with the tensors of the rank that is their key (a global rank).

    Collective. All ranks give the same shapes in the same order.
    """
    begin = {rank: partial(dist.broadcast, src=rank, group=group, async_op=True) for rank in of_ranks}
    _send((bucket, begin[rank]) for rank, tensors in of_ranks.items() for bucket in buckets_of(tensors))


@torch.no_grad()
def _send(messages: Iterable[tuple[list[Tensor], Callable[[Tensor], dist.Work | None]]]) -> None:
    """Send each bucket of tensors as one message, and overwrite the tensors with the received values."""
    under_way: deque[tuple[list[Tensor], Tensor, dist.Work | None]] = deque()

    def finish() -> None:
        bucket, flat, work = under_way.popleft()
        if work is not None:
            work.wait()
        if flat is not bucket[0]:
            parts = flat.split([tensor.numel() for tensor in bucket])
            copy_all(bucket, [part.view(tensor.shape) for part, tensor in zip(parts, bucket)])

    for bucket, begin in messages:
        is_one = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0] if is_one else torch.cat([tensor.reshape(-1) for tensor in bucket])
        under_way.append((bucket, flat, begin(flat)))
        if len(under_way) > UNDER_WAY:
            finish()
    while under_way:
        finish()


def buckets_of(tensors: Iterable[AnyTensor]) -> Iterator[list[AnyTensor]]:
    """Yield the tensors in buckets of one type on one device. A bucket is at most 25 MB, or it is one larger tensor."""
    filling: dict[tuple[torch.dtype, torch.device], list[AnyTensor]] = {}
    num_bytes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        if filling.get(kind) and num_bytes[kind] + tensor.nbytes > _BUCKET:
            yield filling.pop(kind)
            num_bytes[kind] = 0
        filling.setdefault(kind, []).append(tensor)
        num_bytes[kind] += tensor.nbytes
    yield from filling.values()
