"""Cross-entropy over large vocabularies. It works on chunks of rows, without a second tensor of the logits' size."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the target of a sample or token that does not count, as in torch and in Hugging Face's libraries
LARGE = 4096  # classes; for fewer classes, torch's function is faster
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}  # per chunk, in numbers: a cache's size; enough work for a launch


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor, *, ignore_index: int) -> Tensor:
    """Return the sum of the cross-entropies in nats, shape (), at least in float32. Targets are int64.

    The result equals `torch.nn.functional.cross_entropy` up to rounding. That function keeps the logarithms of the
    probabilities for the backward pass, and for 16-bit logits also a 32-bit copy: up to four times the logits' memory. This
    function keeps only the logits.
    """
    if is_cut(logits_NV):
        return _sum_of_cut(logits_NV, targets_N, ignore_index=ignore_index)
    if logits_NV.shape[1] < LARGE or type(logits_NV) is not Tensor:  # or a tracer's stand-in, or a shard
        return _sum_of_wide(logits_NV, targets_N, ignore_index=ignore_index)
    try:
        total: Tensor = _Sum.apply(logits_NV, targets_N, targets_N != ignore_index)  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError:
        raise  # torch's function needs still more
    except (RuntimeError, IndexError):  # under vmap, in forward derivatives, or for a target that is not a class
        return _sum_of_wide(logits_NV, targets_N, ignore_index=ignore_index)
    return total


def compiled_cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor, *, ignore_index: int) -> Tensor:
    """Return the same sum with torch.compile: it reads the logits twice, writes the gradient, and stores nothing so large."""
    if is_cut(logits_NV):
        return cross_entropy_sum(logits_NV, targets_N, ignore_index=ignore_index)
    try:  # the compiled function would end the process at a wrong target
        _refuse_wrong(targets_N, targets_N != ignore_index, num_classes=logits_NV.shape[1])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # under vmap, no number can be read
        return _sum_of_wide(logits_NV, targets_N, ignore_index=ignore_index)
    return _compiled()(logits_NV, targets_N, ignore_index=ignore_index)


def _sum_of_wide(logits_NV: Tensor, targets_N: Tensor, *, ignore_index: int) -> Tensor:
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return F.cross_entropy(wide_NV, targets_N, reduction="sum", ignore_index=ignore_index)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_sum_of_wide, dynamic=False)


def is_cut(logits: Tensor) -> bool:
    """Return whether each process has the logits of some classes only: a DTensor that is cut in its last dim."""
    return any(placement.is_shard(logits.ndim - 1) for placement in getattr(logits, "placements", ()))


def _sum_of_cut(logits_NV: Tensor, targets_N: Tensor, *, ignore_index: int) -> Tensor:
    """Return the sum of the cross-entropies of cut logits. Collective: all processes with a part must call it.

    Under torch's `loss_parallel`, the processes exchange three numbers of each row, and the logits are not gathered.
    """
    is_wrong_N = _refuse_wrong(targets_N, targets_N != ignore_index, num_classes=logits_NV.shape[1])
    total: Any = _sum_of_wide(logits_NV, targets_N, ignore_index=ignore_index)
    return torch.where(is_wrong_N.any(), torch.nan, total.full_tensor())  # on a GPU, an error would have to wait for it


def _refuse_wrong(targets_N: Tensor, counts_N: Tensor, *, num_classes: int) -> Tensor:
    """Return which counted targets are not a class, shape (N,). On a CPU, raise IndexError like torch if there are any."""
    is_wrong_N = counts_N & ((targets_N < 0) | (targets_N >= num_classes))
    if targets_N.device.type == "cpu" and bool(is_wrong_N.any()):
        raise IndexError(f"Target {int(targets_N[is_wrong_N][0])} is out of bounds.")
    return is_wrong_N


def highest_class(logits: Tensor) -> Tensor:
    """Return the class of the largest logit in the last dim; the first of equal classes. Collective if the logits are cut."""
    best: Any = logits.argmax(dim=logits.ndim - 1)  # of cut logits of one sample, torch 2.13 fails with dim=-1
    return best.full_tensor() if is_cut(logits) else best  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    """The sum for whole rows of logits. It keeps only the logits; the backward pass computes the probabilities again."""

    @staticmethod
    def forward(logits_NV: Tensor, targets_N: Tensor, counts_N: Tensor) -> Tensor:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        targets_N1 = torch.where(counts_N, targets_N, 0).unsqueeze(1)
        parts = zip(logits_NV.split(_rows(logits_NV)), targets_N1.split(_rows(logits_NV)))
        chosen_N1 = torch.cat([F.log_softmax(logits, dim=1, dtype=dtype).gather(1, target) for logits, target in parts])
        return torch.where(counts_N, -chosen_N1.squeeze(1), 0.0).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, targets_N, counts_N = ctx.saved_tensors
        targets_N1 = torch.where(counts_N, targets_N, 0).unsqueeze(1)
        grad_N1 = torch.where(counts_N, grad, 0.0).unsqueeze(1)
        if torch.is_grad_enabled():  # this gradient will be differentiated
            probabilities_NV = logits_NV.to(grad.dtype).softmax(dim=1)
            whole_NV = (probabilities_NV - F.one_hot(targets_N1.squeeze(1), logits_NV.shape[1])) * grad_N1
            return whole_NV.to(logits_NV.dtype), None, None
        result_NV = torch.empty_like(logits_NV)
        parts = (part.split(_rows(logits_NV)) for part in (logits_NV, result_NV, targets_N1, grad_N1))
        for logits, result, target, factor in zip(*parts):
            probabilities = F.softmax(logits, dim=1, dtype=grad.dtype)
            of_target = probabilities.gather(1, target).sub_(1.0).mul_(factor)
            torch.mul(probabilities, factor, out=result).scatter_(1, target, of_target.to(result.dtype))
        return result_NV, None, None


def _rows(logits_NV: Tensor) -> int:
    return max(1, _CHUNK.get(logits_NV.device.type, 1 << 20) // logits_NV.shape[1])
