"""Cross-entropy over large vocabularies. It works on chunks of rows, without a second tensor of the logits' size."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
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
        return _sum_of_cut(logits_NV, targets_N, targets_N != ignore_index)
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


@dataclass(frozen=True, eq=False)
class Columns:
    """The classes that a process has, if the logits are cut by class."""

    group: dist.ProcessGroup
    has_N: Tensor  # whether this process has the class of each row's target


def is_cut(logits: Tensor) -> bool:
    """Return whether each process has the logits of some classes only: a DTensor that is cut in its last dim."""
    return any(placement.is_shard(logits.ndim - 1) for placement in getattr(logits, "placements", ()))


def _own_columns(logits: Any) -> tuple[Tensor, int, dist.ProcessGroup]:
    """Return this process's part of cut logits, the number of its first class, and the group of all processes with parts."""
    mesh = logits.device_mesh
    share = -(-logits.shape[-1] // mesh.size())
    return logits.to_local(), min(mesh.get_local_rank() * share, logits.shape[-1]), mesh.get_group()


def _sum_of_cut(logits_NV: Tensor, targets_N: Tensor, counts_N: Tensor) -> Tensor:
    """Return the sum of the cross-entropies without gathering the logits. Collective: all processes with a part must call it.

    For each row, the processes exchange only the largest logit, the sum and the target's logit.
    """
    own_NV, start, group = _own_columns(logits_NV)
    is_wrong_N = _refuse_wrong(targets_N, counts_N, num_classes=logits_NV.shape[1])
    has_N = counts_N & (targets_N >= start) & (targets_N < start + own_NV.shape[1])
    given = own_NV, torch.where(has_N, targets_N - start, 0), counts_N, Columns(group, has_N)
    total, *_ = _SumOfCut.apply(*given)  # type: ignore[no-untyped-call]
    return torch.where(is_wrong_N.any(), torch.nan, total)  # on a device, raising an error would need a synchronisation


def _refuse_wrong(targets_N: Tensor, counts_N: Tensor, *, num_classes: int) -> Tensor:
    """Return which counted targets are not a class, shape (N,). On a CPU, raise IndexError like torch if there are any."""
    is_wrong_N = counts_N & ((targets_N < 0) | (targets_N >= num_classes))
    if targets_N.device.type == "cpu" and bool(is_wrong_N.any()):
        raise IndexError(f"Target {int(targets_N[is_wrong_N][0])} is out of bounds.")
    return is_wrong_N


def highest_class(logits: Tensor) -> Tensor:
    """Return the class of the largest logit in the last dim; the first of equal classes. Collective if the logits are cut."""
    if not is_cut(logits):
        return logits.argmax(dim=-1)
    own, start, group = _own_columns(logits)
    largest, index = own.max(dim=-1)
    whole = largest.clone()
    dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
    found = torch.where(largest == whole, index + start, logits.shape[-1])
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return found


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


class _SumOfCut(torch.autograd.Function):
    """The sum, each row's largest logit, and the logarithm of the sum relative to it. Adding these two would lose precision."""

    @staticmethod
    def forward(logits_NV: Tensor, targets_N: Tensor, counts_N: Tensor, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        largest_N1 = logits_NV.amax(dim=1, keepdim=True).to(dtype)
        dist.all_reduce(largest_N1, op=dist.ReduceOp.MAX, group=columns.group)
        parts = zip(logits_NV.split(_rows(logits_NV)), largest_N1.split(_rows(logits_NV)))
        sums_N1 = torch.cat([(logits - largest).exp_().sum(dim=1, keepdim=True) for logits, largest in parts])
        chosen_N1 = logits_NV.gather(1, targets_N.unsqueeze(1))
        both_N2 = torch.cat([sums_N1, torch.where(columns.has_N.unsqueeze(1), chosen_N1, 0.0).to(dtype)], dim=1)
        dist.all_reduce(both_N2, group=columns.group)
        sums_N1, chosen_N1 = both_N2.split(1, dim=1)
        log_N1 = sums_N1.log()
        losses_N = (largest_N1 - chosen_N1 + log_N1).squeeze(1)
        return torch.where(counts_N, losses_N, 0.0).sum(), largest_N1, log_N1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, columns = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.columns = columns

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("the gradient of a loss of cut logits cannot be differentiated")
        logits_NV, targets_N, counts_N, largest_N1, log_N1 = ctx.saved_tensors
        grad_N = torch.where(counts_N, grad, 0.0)
        chosen_N = torch.where(ctx.columns.has_N, grad_N, 0.0)
        result_NV = torch.empty_like(logits_NV)
        by_row = targets_N.unsqueeze(1), largest_N1, log_N1, grad_N.unsqueeze(1), chosen_N.unsqueeze(1)
        parts = (part.split(_rows(logits_NV)) for part in (logits_NV, result_NV, *by_row))
        for logits, result, target, largest, log, factor, chosen in zip(*parts):
            result.copy_((logits - largest).sub_(log).exp_().mul_(factor).scatter_add_(1, target, -chosen))
        return result_NV, None, None, None


def _rows(logits_NV: Tensor) -> int:
    return max(1, _CHUNK.get(logits_NV.device.type, 1 << 20) // logits_NV.shape[1])
