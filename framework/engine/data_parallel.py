"""The engine of every strategy in which a rank runs the whole model on its own samples."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from framework.engine.forward import Forward
from framework.engine.seam import Engine, MicroBatch, Step, Sums
from framework.modules.tensors import Tree, by_mesh, map_tensors, whole
from framework.optim.optimizers import BuildOptimizer, MakeOptimizer, Trainable
from framework.runtime.torch_internals import copy_all

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DataParallelEngine(Engine):
    """The Engine of every strategy in which a rank runs the whole model on its own samples.

    `model` is what is called: a wrapper; without it, `module` itself. `set_sync(True)` is called before the last micro-batch,
    whose backward pass completes the gradients of all ranks, `set_sync(False)` before the others. The wrapper averages
    over `dp_size` ranks; a loss here is a sum over the GLOBAL count, so this average is undone first. Of ranks that work
    on the same samples (tensor parallelism), one has `is_counted`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        forward: Forward,
        model: Callable[..., Any] | None = None,
        mesh: "DeviceMesh | None" = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        is_counted: bool = True,
        set_sync: Callable[[bool], None] = lambda _: None,
        broadcast: Callable[[Sequence[Tensor]], None] | None = None,
        make_optimizer: MakeOptimizer | None = None,
        num_warm_ups: int = 0,
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.is_counted = is_counted
        self._model = model or module
        self._forward = forward
        self._set_sync = set_sync
        self._broadcast = broadcast
        self._make_optimizer = make_optimizer
        self._num_warm_ups = num_warm_ups
        self._start_gradients: dict[float, Tensor] = {}
        self._buffers = persistent_buffers(module)
        self._parameters = [p for p in module.parameters() if p.requires_grad]

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        scale = loss_scale * self.dp_size / step.num_samples
        sums: Sums = {}
        last = len(step.micro_batches) - 1
        for position, micro_batch in enumerate(step.micro_batches):
            self._set_sync(position == last)
            self._forward.seed_draws(step=index, micro_batch=micro_batch.number)
            # only micro-batch 0 changes the buffers, and only once: not again when checkpointing recomputes its forward
            buffers = [buffer.clone() for buffer in self._buffers]
            outputs, loss = self._forward(self._model, micro_batch)
            if micro_batch.number == 0 and not micro_batch.is_padding:
                buffers = [buffer.clone() for buffer in self._buffers]
            loss.backward(self._start_gradient(0.0 if micro_batch.is_padding else scale, like=loss))
            copy_all(self._buffers, buffers)
            add(sums, self._measured(outputs, loss.detach(), micro_batch, with_metrics=measure))
        return sums

    def _start_gradient(self, scale: float, *, like: Tensor) -> Tensor:
        """Return the gradient that starts a backward pass: the scale itself, cheaper than scaling the loss."""
        if scale not in self._start_gradients:
            self._start_gradients[scale] = torch.full((), scale, dtype=like.dtype, device=like.device)
        return self._start_gradients[scale]

    def _measured(self, outputs: Tree, loss: Tensor, micro_batch: MicroBatch, *, with_metrics: bool) -> Sums:
        sums = {"loss": loss}
        if with_metrics:
            sums |= self._forward.task.metrics(map_tensors(Tensor.detach, outputs), micro_batch.targets)
        if micro_batch.is_padding or not self.is_counted:
            return {name: torch.zeros_like(value) for name, value in sums.items()}
        return sums

    def forward(self, micro_batch: MicroBatch) -> Sums:
        with torch.no_grad():
            outputs, loss = self._forward(self._model, micro_batch)
            return self._measured(outputs, loss, micro_batch, with_metrics=True)

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        kinds = by_mesh([p for p in self._parameters if p.grad is not None])
        norms = [whole(get_total_norm([p.grad for p in kind if p.grad is not None])) for kind in kinds]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        if max_norm is not None:
            for kind in kinds:
                clip_grads_with_norm_(kind, max_norm, norm)
        return norm

    def warm_up(self, step: Step) -> None:
        before = [buffer.clone() for buffer in self._buffers]
        for _ in range(self._num_warm_ups):
            self._set_sync(True)
            _, loss = self._forward(self._model, step.micro_batches[0])
            loss.backward(self._start_gradient(0.0, like=loss))
        copy_all(self._buffers, before)
        self.module.zero_grad(set_to_none=True)

    def sync_buffers(self) -> None:
        if self._broadcast is not None and self._buffers:
            self._broadcast(self._buffers)

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        return build(trained) if self._make_optimizer is None else self._make_optimizer(build, trained)


def add(sums: Sums, more: Sums) -> None:
    """Add `more` to `sums`, in place."""
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value


def persistent_buffers(module: nn.Module) -> list[Tensor]:
    """Return the buffers that the model's state dict holds."""
    state = module.state_dict(keep_vars=True)
    return [buffer for name, buffer in module.named_buffers() if name in state]
