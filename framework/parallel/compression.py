"""Compressed gradients for DistributedDataParallel: one communication hook for each name.

A hook gets a bucket of this rank's gradients and returns a future of the mean over the ranks. `int8`, `top_k` and `powersgd`
add the part of a gradient that compression loses to the next gradient (error feedback). Each rank has its own lost part. No
checkpoint holds it, so such a run is saved only at its end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from framework.runtime.torch_internals import all_gather_single

BLOCK = 256  # number of gradients that share a scale in `int8`
SHARE = 0.05  # the share of a bucket's gradients that `top_k` sends

Name = Literal["fp16", "bf16", "int8", "top_k", "powersgd"]
Hook = Name | Callable[..., Any]


def keeps_state(hook: object) -> bool:
    """Return whether a hook, or the node of a user's hook, keeps values between steps. A partial function keeps none."""
    if isinstance(hook, Mapping):
        return not hook.get("_partial_")
    return hook in ("int8", "top_k", "powersgd") or (callable(hook) and not isinstance(hook, partial))


@dataclass
class HookState:
    """The state that a hook keeps between steps."""

    group: dist.ProcessGroup
    dtype: torch.dtype | None = None  # the dtype of the sums in `half`
    errors: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by bucket and size, because DDP rebuilds its buckets


def register(wrapper: DistributedDataParallel, name: Hook, *, group: dist.ProcessGroup) -> None:
    """Let the wrapper average its gradients with the hook of this name, or with a hook of the user. Collective.

    A hook gets the group and a bucket of gradients, and returns the mean, or a future of it.
    """
    if not isinstance(name, str):

        def run(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:  # DDP reads the annotations
            mean = name(group, bucket)
            if isinstance(mean, Tensor):
                there: Future[Tensor] = Future()
                there.set_result(mean)
                return there
            return mean  # type: ignore[no-any-return]

        wrapper.register_comm_hook(group, run)
    elif name == "powersgd":
        # before step 10, gradients are sent uncompressed, because the first gradients are far from low rank
        state = PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=10)
        wrapper.register_comm_hook(state, powerSGD_hook)  # Vogels et al. 2019
    elif name in ("fp16", "bf16"):
        wrapper.register_comm_hook(HookState(group, torch.float16 if name == "fp16" else torch.bfloat16), half)
    else:
        wrapper.register_comm_hook(HookState(group), int8 if name == "int8" else top_k)


def half(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sum in 16 bits. torch's own hooks are not used: DDP accepts the bfloat16 hook only with NCCL."""
    gradient = bucket.buffer()
    # divide before the sum, because a sum over many ranks could overflow
    sent = gradient.to(state.dtype).div_(state.group.size())
    work = dist.all_reduce(sent, group=state.group, async_op=True)
    return work.get_future().then(lambda done: gradient.copy_(done.value()[0]))


def int8(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Send 8-bit integers, with one scale for each block, and error feedback (Seide et al. 2014; Dettmers 2016)."""
    gradient, num_ranks = bucket.buffer(), state.group.size()
    wanted, where = _with_error(state, bucket)
    blocks = pad(wanted, (0, -wanted.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(gradient.dtype).tiny) / 127
    levels = (blocks / scales).round_().to(torch.int8)
    state.errors[where] = wanted - (levels * scales).flatten()[: wanted.numel()]

    def mean(all_scales: Tensor, all_levels: Tensor) -> Tensor:
        summed = (all_levels * all_scales).sum(dim=0).flatten()[: gradient.numel()]
        return gradient.copy_(summed / num_ranks)

    return _gathered(scales, levels, group=state.group, then=mean)


def top_k(state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Send only the largest gradients, with error feedback (Aji & Heafield 2017; Lin et al. 2018)."""
    gradient, num_ranks = bucket.buffer(), state.group.size()
    wanted, where = _with_error(state, bucket)
    places = wanted.abs().topk(max(1, int(SHARE * wanted.numel())), sorted=False).indices
    values = wanted[places]
    wanted[places] = 0.0
    state.errors[where] = wanted

    def mean(all_values: Tensor, all_places: Tensor) -> Tensor:
        gradient.zero_()
        for theirs, at in zip(all_values, all_places):  # in rank order, so that all ranks sum in the same order
            gradient.index_add_(0, at, theirs)
        return gradient.div_(num_ranks)

    return _gathered(values, places, group=state.group, then=mean)


def _with_error(state: HookState, bucket: dist.GradBucket) -> tuple[Tensor, tuple[int, int]]:
    gradient = bucket.buffer()
    where = (bucket.index(), gradient.numel())
    return gradient + state.errors[where] if where in state.errors else gradient.clone(), where


def _gathered(first: Tensor, second: Tensor, *, group: dist.ProcessGroup, then: Callable[..., Tensor]) -> Future[Tensor]:
    all_first, all_second = (part.new_empty(group.size(), *part.shape) for part in (first, second))
    all_gather_single(all_first.flatten(), first.flatten(), group=group)
    work = all_gather_single(all_second.flatten(), second.flatten(), group=group, async_op=True)

    def finish(done: Future[Any]) -> Tensor:
        done.value()  # raises the error of a failed collective
        return then(all_first, all_second)

    return work.get_future().then(finish)
