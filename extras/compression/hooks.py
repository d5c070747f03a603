"""Compressed gradients for DistributedDataParallel: communication hooks.

A hook gets a process group and a bucket of this rank's gradients, and returns a future of the mean over the ranks. `Int8`,
`TopK` and `PowerSGD` add the part of a gradient that compression loses to the next gradient (error feedback). Each rank has its
own lost part. No checkpoint holds it, so such a run is saved only at its end.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.functional import pad

BLOCK = 256  # number of gradients that share a scale in `Int8`
SHARE = 0.05  # the share of a bucket's gradients that `TopK` sends

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def half(group: dist.ProcessGroup, bucket: dist.GradBucket, *, dtype: Literal["fp16", "bf16"]) -> Future[Tensor]:
    """Sum in 16 bits. torch's own hooks are not used: DDP accepts the bfloat16 hook only with NCCL."""
    gradient = bucket.buffer()
    # divide before the sum, because a sum over many ranks could overflow
    sent = gradient.to(_DTYPES[dtype]).div_(group.size())
    work = dist.all_reduce(sent, group=group, async_op=True)
    return work.get_future().then(lambda done: gradient.copy_(done.value()[0]))


class _ErrorFeedback:
    def __init__(self) -> None:
        self.errors: dict[tuple[int, int], Tensor] = {}  # by bucket and size, because DDP rebuilds its buckets

    def wanted(self, bucket: dist.GradBucket) -> tuple[Tensor, tuple[int, int]]:
        """Return what should be sent, and the key of its error."""
        gradient = bucket.buffer()
        key = (bucket.index(), gradient.numel())
        return gradient + self.errors[key] if key in self.errors else gradient.clone(), key


class Int8(_ErrorFeedback):
    """A hook that sends 8-bit integers with a scale for each block, and error feedback (Seide et al. 2014; Dettmers 2016)."""

    def __call__(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        gradient, num_ranks = bucket.buffer(), group.size()
        wanted, key = self.wanted(bucket)
        blocks = pad(wanted, (0, -wanted.numel() % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(gradient.dtype).tiny) / 127
        levels = (blocks / scales).round_().to(torch.int8)
        self.errors[key] = wanted - (levels * scales).flatten()[: wanted.numel()]

        def mean(all_scales: Tensor, all_levels: Tensor) -> Tensor:
            summed = (all_levels * all_scales).sum(dim=0).flatten()[: gradient.numel()]
            return gradient.copy_(summed / num_ranks)

        return _gathered(scales, levels, group=group, then=mean)


class TopK(_ErrorFeedback):
    """A hook that sends only the largest gradients, with error feedback (Aji & Heafield 2017; Lin et al. 2018)."""

    def __call__(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        gradient, num_ranks = bucket.buffer(), group.size()
        wanted, key = self.wanted(bucket)
        places = wanted.abs().topk(max(1, int(SHARE * wanted.numel())), sorted=False).indices
        values = wanted[places]
        wanted[places] = 0.0
        self.errors[key] = wanted

        def mean(all_values: Tensor, all_places: Tensor) -> Tensor:
            gradient.zero_()
            for theirs, at in zip(all_values, all_places):  # in rank order, so that all ranks sum in the same order
                gradient.index_add_(0, at, theirs)
            return gradient.div_(num_ranks)

        return _gathered(values, places, group=group, then=mean)


class PowerSGD:
    """A hook that sends approximations of low rank (Vogels et al. 2019), as torch computes them."""

    def __init__(self) -> None:
        self._state: PowerSGDState | None = None

    def __call__(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        if self._state is None:
            # before step 10, gradients are sent uncompressed, because the first gradients are far from low rank
            self._state = PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=10)
        return powerSGD_hook(self._state, bucket)


# since torch 2.13, the new name; the old name then warns
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _gathered(first: Tensor, second: Tensor, *, group: dist.ProcessGroup, then: Callable[..., Tensor]) -> Future[Tensor]:
    all_first, all_second = (part.new_empty(group.size(), *part.shape) for part in (first, second))
    all_gather_single(all_first.flatten(), first.flatten(), group=group)
    work = all_gather_single(all_second.flatten(), second.flatten(), group=group, async_op=True)

    def finish(done: Future[Any]) -> Tensor:
        done.value()  # raises the error of a failed collective
        return then(all_first, all_second)

    return work.get_future().then(finish)
