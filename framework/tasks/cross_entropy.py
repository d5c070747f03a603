"""Cross-entropy over large vocabularies: a chunk of rows at a time, without a second tensor as large as the logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGE = 4096  # classes; of fewer, torch's own is faster
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}  # numbers at a time: about what a cache holds; what many launches are worth


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor, *, ignore_index: int) -> Tensor:
    """Return the sum of the cross-entropies in nats, shape (); of a large vocabulary at least in float32. Targets are int64.

    As `torch.nn.functional.cross_entropy` to rounding. That keeps the logarithms of the probabilities for the backward pass,
    and of logits in 16 bits also a copy in 32: up to four times the logits' memory, where this keeps the logits alone.
    """
    if logits_NV.shape[1] < LARGE or type(logits_NV) is not Tensor:  # or a stand-in of a tracer, or a shard
        return F.cross_entropy(logits_NV, targets_N, reduction="sum", ignore_index=ignore_index)
    try:
        total, *_ = _Sum.apply(logits_NV, targets_N, targets_N != ignore_index)  # type: ignore[no-untyped-call]
    except (RuntimeError, IndexError):  # under vmap, in forward derivatives, or of a target that is no class
        return F.cross_entropy(logits_NV, targets_N, reduction="sum", ignore_index=ignore_index)
    return total  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    """The sum, and of each row its largest logit and the logarithm of the others' sum beside it: together they would round."""

    @staticmethod
    def forward(logits_NV: Tensor, targets_N: Tensor, counts_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        largest_N1 = logits_NV.amax(dim=1, keepdim=True).to(dtype)
        parts = zip(logits_NV.split(_rows(logits_NV)), largest_N1.split(_rows(logits_NV)))
        log_N1 = torch.cat([(logits - largest).exp_().sum(dim=1, keepdim=True) for logits, largest in parts]).log_()
        chosen_N1 = logits_NV.gather(1, torch.where(counts_N, targets_N, 0).unsqueeze(1))
        losses_N = (largest_N1 - chosen_N1 + log_N1).squeeze(1)
        return torch.where(counts_N, losses_N, 0.0).sum(), largest_N1, log_N1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, targets_N, counts_N, largest_N1, log_N1 = ctx.saved_tensors
        targets_N, grad_N = torch.where(counts_N, targets_N, 0), torch.where(counts_N, grad, 0.0)
        if torch.is_grad_enabled():  # this gradient will be differentiated
            probabilities_NV = logits_NV.to(log_N1.dtype).softmax(dim=1)
            whole_NV = (probabilities_NV - F.one_hot(targets_N, logits_NV.shape[1])) * grad_N.unsqueeze(1)
            return whole_NV.to(logits_NV.dtype), None, None
        result_NV = torch.empty_like(logits_NV)
        columns = targets_N.unsqueeze(1), largest_N1, log_N1, grad_N.unsqueeze(1)
        parts = (part.split(_rows(logits_NV)) for part in (logits_NV, result_NV, *columns))
        for logits, result, target, largest, log, factor in zip(*parts):
            result.copy_((logits - largest).sub_(log).exp_().mul_(factor).scatter_add_(1, target, -factor))
        return result_NV, None, None


def _rows(logits_NV: Tensor) -> int:
    return max(1, _CHUNK.get(logits_NV.device.type, 1 << 20) // logits_NV.shape[1])
