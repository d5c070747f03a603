"""BatchNorm over the samples of all processes, on any device (torch's own SyncBatchNorm runs only on GPUs)."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.engine.forward import Forward
from framework.runtime.torch_internals import BATCH_NORMS


def synchronise(model: nn.Module, *, group: dist.ProcessGroup, forward: Forward) -> None:
    """Let every BatchNorm layer in training take its statistics over all ranks of `group`. Names and state do not change.

    Every rank of the group must run the same number of micro-batches. `forward` knows the padding, which does not count.
    """
    for layer in model.modules():
        if isinstance(layer, BATCH_NORMS):
            layer.forward = functools.partial(_normalise, layer, layer.forward, group, forward)  # type: ignore[method-assign]


def _normalise(layer: BATCH_NORMS, own: Callable[..., Tensor], group: dist.ProcessGroup, forward: Forward, x: Tensor) -> Tensor:
    """Normalise x (B, C, ...) by the mean and variance of all ranks' x, in two passes: the mean, then the variance."""
    if not layer.training:
        return own(x)
    kind, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))  # counts and sums are too large for 16 bits
    dims = [dim for dim in range(x.ndim) if dim != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    weight = 0.0 if forward.is_padding else 1.0
    mine = torch.full((1,), weight * x.numel() / x.shape[1], dtype=x.dtype, device=x.device)
    sums: Tensor = _Sum.apply(torch.cat([weight * x.sum(dims), mine]), group)
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = x - mean.view(shape)
    squares: Tensor = _Sum.apply(weight * centred.square().sum(dims), group)
    variance = squares / count
    _follow(layer, mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
    normal = centred * (variance + layer.eps).rsqrt().view(shape)
    if layer.weight is not None:
        normal = normal * layer.weight.view(shape) + layer.bias.view(shape)
    return normal.to(kind)


def _follow(layer: BATCH_NORMS, mean: Tensor, variance: Tensor) -> None:
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        return
    layer.num_batches_tracked.add_(1)
    momentum = layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), momentum)


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
