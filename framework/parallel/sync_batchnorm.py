"""BatchNorm over the samples of all processes, on any device (torch's own SyncBatchNorm runs only on GPUs)."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from framework.engine.forward import Forward
from framework.runtime.torch_internals import BATCH_NORMS


class OfSync(BATCH_NORMS):
    """What a model's nn.SyncBatchNorm becomes: the same layer with the forward of BatchNorm, for any number of dimensions."""

    def _check_input_dim(self, _: Tensor) -> None:
        pass


def replace_sync(model: nn.Module) -> None:
    """Let every nn.SyncBatchNorm be a layer that `synchronise` can synchronise. Names and state do not change."""
    for layer in model.modules():
        if type(layer) is nn.SyncBatchNorm:
            layer.__class__ = OfSync  # type: ignore[assignment]


def synchronise(model: nn.Module, *, group: dist.ProcessGroup, forward: Forward) -> None:
    """Let every BatchNorm layer in training take its statistics over all ranks of `group`. Names and state do not change.

    A layer keeps its own forward, for example with an activation: only the `F.batch_norm` in it is another. Every rank of the
    group must run the same number of micro-batches. `forward` knows the padding, which does not count.
    """
    for layer in model.modules():
        if isinstance(layer, BATCH_NORMS):
            layer.forward = functools.partial(_over_ranks, layer, layer.forward, group, forward)  # type: ignore[method-assign]


def _over_ranks(
    layer: nn.Module, own: Callable[..., Tensor], group: dist.ProcessGroup, forward: Forward, *given: Any, **named: Any
) -> Tensor:
    if not layer.training:
        return own(*given, **named)
    with _Synchronised(group, forward):
        return own(*given, **named)


class _Synchronised(TorchFunctionMode):
    def __init__(self, group: dist.ProcessGroup, forward: Forward) -> None:
        super().__init__()
        self._normalise = functools.partial(_normalise, group=group, forward=forward)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._normalise if function is F.batch_norm else function)(*args, **(kwargs or {}))


def _normalise(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    group: dist.ProcessGroup,
    forward: Forward,
) -> Tensor:
    """`F.batch_norm` of x (B, C, ...) by the mean and variance of all ranks' x, in two passes: the mean, then the variance."""
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    kind, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))  # counts and sums are too large for 16 bits
    dims = [dim for dim in range(x.ndim) if dim != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    share = 0.0 if forward.is_padding else 1.0
    mine = torch.full((1,), share * x.numel() / x.shape[1], dtype=x.dtype, device=x.device)
    sums: Tensor = _Sum.apply(torch.cat([share * x.sum(dims), mine]), group)
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = x - mean.view(shape)
    squares: Tensor = _Sum.apply(share * centred.square().sum(dims), group)
    variance = squares / count
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
        unbiased = variance.detach() * count / (count - 1).clamp(min=1)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    normal = centred * (variance + eps).rsqrt().view(shape)
    if weight is not None:
        normal = normal * weight.view(shape)
    if bias is not None:
        normal = normal + bias.view(shape)
    return normal.to(kind)


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a group. Its gradient is the sum of the ranks' gradients, because every rank uses the sum."""

    @staticmethod
    def forward(ctx, value: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def,override]  # torch's own signature
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def,override]
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
