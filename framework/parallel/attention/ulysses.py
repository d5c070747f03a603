"""Attention by heads: ranks exchange all heads of some tokens for all tokens of some heads, and back."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from framework.parallel.attention.cut import Cut

Parts = tuple[int, list[int]]  # how a tensor is cut over the ranks: a dim, and the size of each rank's part


def by_heads(mix: Callable[..., Tensor], *, cut: Cut, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Wrap a mixer of (B, N, T, E) tensors: callers give all heads of some tokens, and it runs on all tokens of some heads.

    Each rank must have one run of tokens. Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
    """

    def run(*tensors: Tensor) -> Tensor:
        tokens = 2, cut.counts
        mixed = mix(*(_Exchange.apply(t, (1, [t.shape[1] // cut.size] * cut.size), tokens, group) for t in tensors))
        return _Exchange.apply(mixed, tokens, (1, [mixed.shape[1]] * cut.size), group)

    return run


class _Exchange(torch.autograd.Function):
    """The exchange of all heads of some tokens for all tokens of some heads. Its gradient is exchanged back."""

    @staticmethod
    def forward(ctx, tensor: Tensor, sent: Parts, received: Parts, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def,override]  # torch's own signature
        ctx.back = received, sent, group
        return _exchange(tensor, sent, received, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def,override]
        return _exchange(gradient, *ctx.back), None, None, None


def _exchange(tensor: Tensor, sent: Parts, received: Parts, group: dist.ProcessGroup) -> Tensor:
    """Send each rank its part along one dim; join the received parts along another dim."""
    dim, sizes = received
    parts = tensor.split(sent[1], dim=sent[0])
    shape = parts[group.rank()].shape
    shapes = [[*shape[:dim], size, *shape[dim + 1 :]] for size in sizes]
    flat = torch.cat([part.flatten() for part in parts])
    counts = [math.prod(shape) for shape in shapes]
    result = flat.new_empty(sum(counts))
    dist.all_to_all_single(result, flat, counts, [part.numel() for part in parts], group=group)
    return torch.cat([part.view(shape) for part, shape in zip(result.split(counts), shapes)], dim=dim)
