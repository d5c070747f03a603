"""Gradients sent as 8-bit integers, a scale for each block, with error feedback (Seide et al. 2014; Dettmers 2016)."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.functional import pad

BLOCK = 256  # gradients that share a scale


class State:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.errors: dict[tuple[int, int], Tensor] = {}  # by bucket and size: DDP lays buckets out anew after a step


def hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean of the ranks' rounded gradients; what rounding loses is added to the next gradient."""
    gradient, num_ranks = bucket.buffer(), state.group.size()
    where = (bucket.index(), gradient.numel())
    wanted = gradient + state.errors[where] if where in state.errors else gradient
    blocks = pad(wanted, (0, -wanted.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(gradient.dtype).tiny) / 127
    levels = (blocks / scales).round_().to(torch.int8)
    state.errors[where] = wanted - (levels * scales).flatten()[: wanted.numel()]

    all_levels = levels.new_empty(num_ranks, *levels.shape)
    all_scales = scales.new_empty(num_ranks, *scales.shape)
    dist.all_gather_single(all_scales.flatten(), scales.flatten(), group=state.group)
    work = dist.all_gather_single(all_levels.flatten(), levels.flatten(), group=state.group, async_op=True)

    def mean(_: object) -> Tensor:
        summed = (all_levels * all_scales).sum(dim=0).flatten()[: gradient.numel()]
        return gradient.copy_(summed / num_ranks)

    return work.get_future().then(mean)
