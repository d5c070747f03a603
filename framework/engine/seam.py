"""The seam between the loop and the strategies: an Engine turns micro-batches into gradients, whatever runs where."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from framework.modules.tensors import Tree, map_tensors
from framework.optim.optimizers import BuildOptimizer, Trainable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MicroBatch(NamedTuple):
    """What goes through the model at once. `number` counts the micro-batches of the global batch; it seeds randomness."""

    number: int
    inputs: Tree
    targets: Tree
    is_padding: bool = False  # has weight zero: every rank then enters the same collectives

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Return the micro-batch with `function` applied to each of its tensors."""
        return self._replace(inputs=map_tensors(function, self.inputs), targets=map_tensors(function, self.targets))


class Step(NamedTuple):
    """This rank's part of one global batch."""

    epoch: int
    num_samples: int  # of the global batch, over all ranks
    micro_batches: Sequence[MicroBatch]
    is_even: bool = True  # are all micro-batches of one size, on all ranks? Then all ranks cut a step in the same way


class Task(Protocol):
    """What the numbers mean: the loss and the metrics. All are SUMS over samples, shape ()."""

    def loss(self, outputs: Any, targets: Any) -> Tensor: ...

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Tensor]: ...


Sums = dict[str, Tensor]


@dataclass(frozen=True)
class Demands:
    """What a run needs of its strategy, in addition to running the model: the strategy's `problems` may refuse it."""

    eval_every: int | None  # in optimizer steps; null = only at the end
    checkpoint_every: int | None
    sync_batchnorm: bool
    ema_decay: float | None
    grad_noise: float | None
    scales_loss: bool
    recovers: str | None  # skip or rollback, after a step that is not finite
    bitwise: bool


class Engine(Protocol):
    """A model under a strategy. Methods are collective: every rank calls them, in the same order.

    `module` holds this rank's parameters (plain tensors or DTensor shards) under the model's own names.
    """

    module: nn.Module
    mesh: "DeviceMesh | None"
    dp_rank: int
    dp_size: int

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        """Leave in `.grad` the gradient of the global batch's mean loss, times `loss_scale`.

        `index` is the number of the step. Returns this rank's sums over its samples: the loss, and with `measure`
        the task's metrics.
        """

    def forward(self, micro_batch: MicroBatch) -> Sums:
        """Evaluate: the same sums, without gradients; all zero for padding."""

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Scale the gradients so that their global L2 norm is at most `max_norm`; return the norm before, shape ()."""

    def warm_up(self, step: Step) -> None:
        """Run once, before the first step, what must not happen in it. Leaves no trace in the model."""
        return

    def sync_buffers(self) -> None:
        """Give every rank the buffers (running statistics) that followed micro-batch 0."""

    def can_pause(self, step: int) -> bool:
        """Return whether any strategy can continue from the state after this many steps."""
        return True

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        """Build the optimizer of what this rank updates. `trained` are the parameters in `module`."""


class EngineAround(Engine):
    """An Engine that passes every call on to the engine inside; a subclass defines the calls that it changes."""

    def __init__(self, engine: Engine) -> None:
        self.module = engine.module
        self.mesh = engine.mesh
        self.dp_rank, self.dp_size = engine.dp_rank, engine.dp_size
        self._engine = engine

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        return self._engine.forward_backward(step, index=index, loss_scale=loss_scale, measure=measure)

    def forward(self, micro_batch: MicroBatch) -> Sums:
        return self._engine.forward(micro_batch)

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        return self._engine.clip_grad_norm(max_norm)

    def warm_up(self, step: Step) -> None:
        self._engine.warm_up(step)

    def sync_buffers(self) -> None:
        self._engine.sync_buffers()

    def can_pause(self, step: int) -> bool:
        return self._engine.can_pause(step)

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        return self._engine.make_optimizer(build, trained)
