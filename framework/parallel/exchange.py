"""Tokens go to the processes with their experts. Shapes: N tokens, D dim, K experts of a token, M received rows."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from framework.modules.tensors import local
from framework.runtime.torch_internals import without_modes

Counts = tuple[list[int], list[int]]  # the number of rows sent to each rank of the group, and received from each rank


def by_owner(module: nn.Module, *, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Wrap a module of experts, cut over the group; callers give this rank's own tokens. Collective, as is its gradient.

    A token goes to each of its experts, even if many other tokens go there: no token is dropped, and no place is left empty.
    Source: Lepikhin et al. 2020, "GShard"; without its capacity.
    """
    num_experts, kinds = next(nn.Module.parameters(module)).shape[0], dict[Any, torch.dtype]()
    share = -(-num_experts // group.size())  # as DTensor cuts: the last ranks may have fewer experts, or none

    def run(*given: Tensor, **named: Tensor) -> Tensor:
        x_ND, index_NK, weights_NK = (*given, *named.values())
        num_choices = index_NK.shape[1]
        chosen = index_NK.flatten()
        order = chosen.argsort(stable=True)
        counts = _counts(chosen // share, group)
        index_M1 = _sent((chosen[order] % share).unsqueeze(1), counts, group)
        rows_MD, weights_M1 = Exchange.apply(counts, group, x_ND[order // num_choices], weights_NK.reshape(-1, 1)[order])
        own = {name: local(parameter) for name, parameter in module.named_parameters(recurse=False)}
        device = x_ND.device.type
        key = x_ND.dtype, weights_NK.dtype, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        if key not in kinds:
            kinds[key] = _type_of_result(module, rows_MD, weights_M1)
        y_MD = run_part(module, own, rows_MD, index_M1, weights_M1) if len(rows_MD) else rows_MD
        y_MD = _joined(y_MD.to(kinds[key]), rows_MD, weights_M1, *own.values())
        (back,) = Exchange.apply(counts[::-1], group, y_MD)
        return back[order.argsort()].unflatten(0, (-1, num_choices)).sum(dim=1)  # type: ignore[no-any-return]

    return run


def run_part(module: nn.Module, stacked: Mapping[str, Tensor], *given: Tensor) -> Tensor:
    """Call a module of experts with the parameters of only some of its experts; their indices count from 0.

    A module must read the number of experts from its parameters, or from `num_experts`.
    """
    part = object.__new__(type(module))  # copy.copy would call the constructor of a sharded module's class
    vars(part).update(vars(module))
    state = vars(part)
    state.pop("forward", None)  # remove the wrapper around the whole module
    state["_parameters"] = {}
    state.update(stacked)  # tensors that autograd follows, not parameters
    if "num_experts" in state:
        state["num_experts"] = next(iter(stacked.values())).shape[0]
    return part.forward(*given)  # type: ignore[no-any-return]


def _type_of_result(module: nn.Module, x_MD: Tensor, weights_M1: Tensor) -> torch.dtype:
    """Return the dtype of the module's outputs: every rank needs it, even a rank without rows or without experts."""
    one = {name: local(p).new_zeros(1, *p.shape[1:]) for name, p in module.named_parameters(recurse=False)}
    # outside of the modes: this runs once, but selective recomputation expects the same operations in the second forward
    with torch.no_grad(), without_modes():
        index_11 = torch.zeros(1, 1, dtype=torch.int64, device=x_MD.device)
        return run_part(module, one, x_MD.new_zeros(1, x_MD.shape[1]), index_11, weights_M1.new_zeros(1, 1)).dtype


def _counts(owners: Tensor, group: dist.ProcessGroup) -> Counts:
    sent = torch.bincount(owners, minlength=group.size())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return sent.tolist(), received.tolist()


def _joined(y_MD: Tensor, *others: Tensor) -> Tensor:
    """Return `y_MD` as if it depended on the others: a rank without received rows must also run the backward pass."""
    return torch.cat([y_MD, *(other.reshape(-1)[:0].view(0, y_MD.shape[1]).to(y_MD.dtype) for other in others)])


def _sent(rows: Tensor, counts: Counts, group: dist.ProcessGroup) -> Tensor:
    """Send each rank its run of rows; return the received rows, in the order of the ranks."""
    sent, received = counts
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


class Exchange(torch.autograd.Function):
    """The exchange of several tensors' rows. One node returns all their gradients, so all ranks use the same order."""

    @staticmethod
    def forward(ctx: Any, counts: Counts, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = counts[::-1], group
        return tuple(_sent(tensor, counts, group) for tensor in tensors)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        return None, None, *(_sent(g, *ctx.back) if is_wanted else None for g, is_wanted in zip(gradients, wanted))
