"""Gradients sent in half the bits: what `fp16` and `bf16` have in common."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


def mean_in(dtype: torch.dtype, group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean of the bucket over the ranks, rounded to `dtype` on the way."""
    gradient = bucket.buffer()
    # divided first: the sum of many could overflow
    sent = gradient.to(dtype).div_(group.size())
    work = dist.all_reduce(sent, group=group, async_op=True)
    return work.get_future().then(lambda _: gradient.copy_(sent))
