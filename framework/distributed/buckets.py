"""Many tensors in few messages: one collective per 25 MB, not one per tensor."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


class Message:
    """A bucket of tensors that is sent as one message. The constructor starts the message. Collective."""

    def __init__(self, bucket: Sequence[Tensor], begin: Callable[[Tensor], dist.Work | None]) -> None:
        is_one = len(bucket) == 1 and bucket[0].is_contiguous()
        self._bucket = bucket
        self._flat = bucket[0] if is_one else torch.cat([tensor.reshape(-1) for tensor in bucket])
        self._work = begin(self._flat)

    def finish(self) -> None:
        """Wait, and overwrite the tensors with the received values."""
        if self._work is not None:
            self._work.wait()
        if self._flat is not self._bucket[0]:
            parts = self._flat.split([tensor.numel() for tensor in self._bucket])
            copy_all(self._bucket, [part.view(tensor.shape) for part, tensor in zip(parts, self._bucket)])


@torch.no_grad()
def _send(messages: Iterable[tuple[list[Tensor], Callable[[Tensor], dist.Work | None]]]) -> None:
    under_way: deque[Message] = deque()
    for bucket, begin in messages:
        under_way.append(Message(bucket, begin))
        if len(under_way) > UNDER_WAY:
            under_way.popleft().finish()
    while under_way:
        under_way.popleft().finish()


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
