"""Replicas of a model, whose gradients are summed over the processes."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
from annotated_types import Ge
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import TypedDict

from framework.distributed.buckets import sum_all
from framework.engine.seam import Demands
from framework.modules.tensors import local
from framework.optim.update import gradient_or_zeros
from framework.runtime.exits import Unfit
from framework.runtime.torch_internals import without_buffer_sync

Hook = Callable[..., Any]  # from a process group and a bucket of this rank's gradients to their mean, or to a future of it


class ReplicaOptions(TypedDict, total=False):
    """The arguments of DistributedDataParallel that a user can set."""

    bucket_cap_mb: Annotated[int, Ge(1)]
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    hook: Hook | None


def problems(*, demands: Demands, hook: Mapping[str, Any] | None = None, **others: object) -> list[str]:
    """Return which demands of the run do not fit gradients that a hook sums."""
    if hook is None:
        return []
    if not isinstance(hook, Mapping):
        return [f"hook={hook}: is not a component (hook._target_=MODULE.FUNCTION hook._partial_=true)"]
    found, name = list[str](), hook["_target_"]
    if keeps_state(hook):
        kept = {"checkpoint.every": demands.checkpoint_every, "checkpoint.keep_best": demands.keep_best or None}
        why = f"but parallel.hook ({name}) keeps values from step to step that no checkpoint holds"
        found += [f"{key}: {asked}, {why} (null or 0: it is saved at its end)" for key, asked in kept.items() if asked]
        if demands.recovers:
            found.append(f"trainer.divergence.action: {demands.recovers}, but parallel.hook ({name}) keeps values that are not "
                         "finite for later steps (raise, or a function as the hook)")  # fmt: skip
    if demands.own_step:
        found.append(f"parallel.hook: {name}, but a task's own step cannot use it (null)")
    if demands.bitwise:
        found.append(f"parallel.hook: {name}, but its result depends on the number of processes (invariance=samples, or null)")
    return found


def keeps_state(hook: object) -> bool:
    """Return whether a hook, or a hook's node, keeps values between steps. Only a partial function keeps none."""
    return not hook.get("_partial_") if isinstance(hook, Mapping) else not isinstance(hook, partial)


class SavedAtEnd:
    """A part of the loop for a strategy with values that no checkpoint holds: the run is saved only at its end."""

    def can_save(self, loop: Any) -> bool:
        return bool(loop.is_ending)


class Replica:
    """A model in a DistributedDataParallel. Without a hook, gradients are summed. The constructor is collective."""

    def __init__(self, model: nn.Module, *, hook: Hook | None = None, **options: Any) -> None:
        # buffers follow micro-batch 0; without device_ids, the inputs stay on the devices where the loader has put them
        arguments: dict[str, Any] = {**without_buffer_sync(), **options}
        # the strides of a 1x1 convolution in channels-last order are ambiguous
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides", category=UserWarning)
        self._wrapper = DistributedDataParallel(model, **arguments)
        self._is_summed = True
        sums = summed if hook is None else _with_future(hook)

        def noted(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
            self._is_summed |= bucket.is_last()  # the reducer sums its buckets in their order
            return sums(group, bucket)

        self._wrapper.register_comm_hook(self._wrapper.process_group, noted)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._wrapper(*arguments, **named)

    def set_sync(self, does_sync: bool) -> None:
        """Set whether the next backward pass sums the gradients over the ranks."""
        self._is_summed = not does_sync
        self._wrapper.require_backward_grad_sync = does_sync  # as no_sync() does, without a context for each micro-batch

    def require_sums(self) -> None:
        """Raise Unfit if the last backward pass has not summed all gradients: the reducer waits for an unused parameter.

        The parameter may have a gradient, of an earlier micro-batch.
        """
        if self._is_summed:
            return
        named = self._wrapper.module.named_parameters()
        unused = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
        some = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        what = f"{some} in every step" if unused else "every parameter in every micro-batch"
        raise Unfit(f"parallel.find_unused_parameters: false, but the model's forward does not use {what} (true, at a small "
                    "cost; or freeze the unused parameters)")  # fmt: skip

    def settle(self) -> None:
        """Let DistributedDataParallel lay out its buckets. Collective."""
        settle_buckets(self._wrapper)


def summed(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sum a bucket over the ranks.

    DDP itself averages it. The losses would then have to be larger by the number of ranks, and a backward pass that reads its
    gradients (a clamp, an overflow in fp16) would compute something else.
    """
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])  # value() raises the error of a failed collective


def _with_future(hook: Hook) -> Hook:
    """Return the hook in the form that DDP takes: it reads the annotations, and needs a future."""

    def run(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        mean = hook(group, bucket)
        if isinstance(mean, Tensor):
            there: Future[Tensor] = Future()
            there.set_result(mean)
            return there
        return mean  # type: ignore[no-any-return]

    return run


def sum_gradients(parameters: Sequence[nn.Parameter], *, group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients over the ranks of the group (None: all ranks); of a shard, this rank's part. Collective.

    A gradient that only some ranks have counts as zero on the other ranks.
    """
    if not parameters:
        return
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)  # on the CPU: the host reads them
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    sum_all((local(gradient_or_zeros(p)) for p, is_used in zip(parameters, used.tolist()) if is_used), group=group)


class _Zero(nn.Module):
    """A zero that gives every parameter a gradient of zeros; the last parameter gets its gradient first, as in most models."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._given = parameters

    def forward(self, zero: Tensor) -> Tensor:
        for parameter in self._given:
            zero = zero + (torch.view_as_real(parameter) if parameter.is_complex() else parameter).sum().to(zero) * 0.0
        return zero


def settle_buckets(wrapper: DistributedDataParallel) -> None:
    """Let the reducer lay out its buckets without a forward pass of the model. Collective.

    The reducer does so once, after the first backward pass, and the layout decides in which order a ring sums. Without this
    call, the first step after a resume would be summed in another order.
    """
    model = wrapper.module
    parameters = [p for p in nn.Module.parameters(model) if p.requires_grad]
    wrapper.module = _Zero(parameters)
    try:
        for _ in range(2):  # the second pass uses the new layout
            wrapper(torch.zeros((), dtype=parameters[0].dtype.to_real(), device=parameters[0].device)).backward()
    finally:
        wrapper.module = model
    model.zero_grad(set_to_none=True)
