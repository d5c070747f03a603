"""Embeddings and heads cut by the vocabulary: each process has some tokens' rows, and one weight for both if they are tied."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from framework.engine.seam import Task, says_itself
from framework.modules.tensors import local
from framework.runtime.torch_internals import shard_offsets


def stays_cut(task: Task) -> bool:
    """Return whether a task takes cut logits: a DTensor in which each process has the logits of some tokens."""
    return says_itself(task, "takes_cut_logits")


@dataclass(eq=False)
class Vocabulary(ParallelStyle):
    """The cut of an nn.Embedding, or of an nn.Linear for the logits, by rows of the weight; the last process may have fewer.

    An embedding looks up its own tokens; the sum over the processes has all tokens. A head's logits are gathered; in training
    with `keeps_cut`, they stay cut (a DTensor, cut in its last dim). Both are exact: a sum has only one number that is not
    zero, and the input's gradient is the sum over the processes. Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    keeps_cut: bool
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)  # weights before and after: tied ones once

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in self.made:
                shard = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)], src_data_rank=None)
                self.made[id(parameter)] = parameter, nn.Parameter(shard, requires_grad=parameter.requires_grad)
            module.register_parameter(name, self.made[id(parameter)][1])
        run: Any = _embed if isinstance(module, nn.Embedding) else partial(_logits, keeps_cut=self.keeps_cut)
        module.forward = partial(run, module, mesh=device_mesh)  # type: ignore[method-assign]
        return module


def row_problem(layer: nn.Module, *, num_parts: int) -> str:
    """Return why a layer's rows cannot be cut over so many processes; "" if they can."""
    if type(layer) is nn.Embedding:
        options = {"max_norm": layer.max_norm, "scale_grad_by_freq": layer.scale_grad_by_freq, "sparse": layer.sparse}
        if set_ := [name for name, value in options.items() if value]:
            return f"has {set_[0]}, which needs all rows"
    elif type(layer) is not nn.Linear:
        return f"is a {type(layer).__name__}, and only an nn.Embedding or nn.Linear has rows for tokens"
    num_rows = rows_of(layer)
    if -(-num_rows // num_parts) * (num_parts - 1) >= num_rows:
        return f"has {num_rows} rows, too few for {num_parts} processes"
    return ""


def rows_of(layer: nn.Module) -> int:
    """Return the number of rows of the weight: the size of the vocabulary."""
    return int(layer.weight.shape[0])  # type: ignore[index,union-attr]


def _embed(layer: nn.Embedding, tokens: Tensor, *, mesh: DeviceMesh) -> Tensor:
    rows, start = local(layer.weight), shard_offsets(layer.weight)[0]
    is_any = (tokens >= 0) & (tokens < layer.weight.shape[0])
    if tokens.device.type == "cpu" and not is_any.all():
        raise IndexError(f"token {int(tokens[~is_any][0])} is out of range of a vocabulary of {layer.weight.shape[0]}")
    is_own = (tokens >= start) & (tokens < start + len(rows))
    padding = layer.padding_idx
    own_padding = padding - start if padding is not None and start <= padding < start + len(rows) else None
    found = F.embedding(torch.where(is_own, tokens - start, 0), rows, own_padding)
    others = torch.where(is_any, 0.0, torch.nan).to(rows.dtype)  # on other devices, an error would have to wait for the device
    own = torch.where(is_own.unsqueeze(-1), found, others.unsqueeze(-1))
    return _Summed.apply(own, mesh.get_group())  # type: ignore[no-any-return,no-untyped-call]


def _logits(layer: nn.Linear, inputs: Tensor, *, mesh: DeviceMesh, keeps_cut: bool) -> Tensor:
    bias = local(layer.bias) if layer.bias is not None else None
    own = F.linear(_Copied.apply(inputs, mesh.get_group()), local(layer.weight), bias)  # type: ignore[no-untyped-call]
    shape = torch.Size([*own.shape[:-1], layer.weight.shape[0]])
    stride = torch.empty(shape, device="meta").stride()
    cut = DTensor.from_local(own, mesh, [Shard(own.ndim - 1)], run_check=False, shape=shape, stride=stride)
    return cut if keeps_cut and layer.training and torch.is_grad_enabled() else _Gathered.apply(own, cut.detach())  # type: ignore[no-any-return,no-untyped-call]


class _Summed(torch.autograd.Function):
    """The sum over the processes. Each process then has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = own.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch's own
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Copied(torch.autograd.Function):
    """A tensor that all processes have. Each process has a part of its gradient, and the parts are summed."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch's own
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Gathered(torch.autograd.Function):
    """All processes' parts of the last dim. Each process has the whole gradient, and takes its own part of it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, cut: DTensor) -> Tensor:
        start = shard_offsets(cut)[-1]
        ctx.span = start, start + own.shape[-1]
        return cut.full_tensor()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch's own
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient[..., slice(*ctx.span)].contiguous(), None
