"""The rows of all ranks, joined."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(own: Tensor, *, group: dist.ProcessGroup | None, counts: Sequence[int] | None = None) -> Tensor:
    """Return all ranks' rows (n, ...), in rank order; ranks may have different numbers of rows. Collective.

    `counts` are these numbers, if the caller knows them. Differentiable; the backward pass is collective too. The gradient of a
    row is the sum of the gradients of all ranks.
    """
    if counts is None:
        sizes = [torch.zeros(1, dtype=torch.long, device=own.device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, torch.tensor([len(own)], device=own.device), group=group)
        counts = [int(size) for size in sizes]
    gathered: Tensor = _Rows.apply(own, counts, group)
    return gathered


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:  # type: ignore[no-untyped-def,override]  # torch's own signature
        start = sum(counts[: dist.get_rank(group)])
        ctx.span, ctx.group = slice(start, start + len(own)), group
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts)])

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def,override]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.span], None, None
