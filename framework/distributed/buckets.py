"""Many tensors in few messages: a collective for each 25 MB, not for each tensor."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from framework.runtime.torch_internals import copy_all

_BUCKET = 25 * 2**20  # bytes, as DistributedDataParallel's
_UNDER_WAY = 2  # messages: the memory that they take beside the tensors


def sum_all(tensors: Iterable[Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """Sum each tensor over the ranks of a group, in place. Collective, with the same shapes in the same order on all."""
    begin = partial(dist.all_reduce, group=group, async_op=True)
    _send((bucket, begin) for bucket in _buckets(tensors))


def broadcast_all(of_ranks: Mapping[int, Iterable[Tensor]], *, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite every rank's tensors by those of the rank under which they are given, a number among all ranks.

    Collective, with the same shapes in the same order on all.
    """
    begin = {rank: partial(dist.broadcast, src=rank, group=group, async_op=True) for rank in of_ranks}
    _send((bucket, begin[rank]) for rank, tensors in of_ranks.items() for bucket in _buckets(tensors))


@torch.no_grad()
def _send(messages: Iterable[tuple[list[Tensor], Callable[[Tensor], dist.Work | None]]]) -> None:
    under_way: deque[tuple[Sequence[Tensor], Tensor, dist.Work | None]] = deque()

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
        if len(under_way) > _UNDER_WAY:
            finish()
    while under_way:
        finish()


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in groups of one type, on one device, that are not larger than a message; or one that is."""
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    num_bytes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        if filling.get(kind) and num_bytes[kind] + tensor.nbytes > _BUCKET:
            yield filling.pop(kind)
            num_bytes[kind] = 0
        filling.setdefault(kind, []).append(tensor)
        num_bytes[kind] += tensor.nbytes
    yield from filling.values()
