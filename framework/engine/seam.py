"""The seam between the loop and the strategies: an Engine turns micro-batches into gradients, whatever runs where."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from framework.modules.nested import Tree
from framework.optim.optimizers import BuildOptimizer, Trainable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MicroBatch(NamedTuple):
    """What goes through the model at once. `number` counts the micro-batches of the global batch; it keys randomness."""

    number: int
    inputs: Tree
    targets: Tree
    is_padding: bool = False  # runs with weight zero, so that every rank enters the same collectives


class Step(NamedTuple):
    """This rank's part of one global batch."""

    epoch: int
    num_samples: int  # of the global batch, over all ranks
    micro_batches: Sequence[MicroBatch]
    is_even: bool = True  # are each rank's micro-batches of one size? On all ranks, so that they can cut a step alike


class Task(Protocol):
    """What the numbers mean: the loss, the metrics, what counts as one sample. All are SUMS over samples, shape ()."""

    def loss(self, outputs: Any, targets: Any) -> Tensor: ...

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Tensor]: ...


Sums = dict[str, Tensor]


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

    def sync_buffers(self) -> None:
        """Give every rank the buffers (running statistics) that followed micro-batch 0."""

    def can_pause(self, step: int) -> bool:
        """Return whether the state after this many steps is one that any strategy can continue from."""

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        """Build the optimizer of what this rank updates. `trained` are the parameters in `module`."""
