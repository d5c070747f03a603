"""The interface between the loop and the strategies: an Engine turns micro-batches into gradients, on any layout of ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.engine.sums import Sums, Value, add, weight_of
from framework.modules.tensors import Tree, by_mesh, map_tensors
from framework.optim.optimizers import BuildOptimizer, Trainable
from framework.optim.update import Average
from framework.runtime.exits import Unfit
from framework.runtime.torch_internals import multiply_all

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MicroBatch(NamedTuple):
    """The samples that go through the model at once. `number` is the place in the global batch; it seeds random draws."""

    number: int
    inputs: Tree
    targets: Tree
    num_samples: int
    start: int  # the index of its first sample in the global batch
    is_padding: bool = False  # has weight zero: it lets every rank run the same collectives
    keys: np.ndarray | None = None  # for the augmentation of its samples, until the augmentation is done
    samples: Sequence[int] = ()  # their numbers in the stored data, for messages
    split: str = ""

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Return the micro-batch with `function` applied to each of its tensors."""
        return self._replace(inputs=map_tensors(function, self.inputs), targets=map_tensors(function, self.targets))


class Step(NamedTuple):
    """This rank's part of one global batch."""

    epoch: int
    num_samples: int  # of the global batch, over all ranks
    micro_batches: Sequence[MicroBatch]
    turn: str = ""  # the turn whose parameters it moves; empty: all parameters
    is_even: bool = True  # all micro-batches on all ranks have the same size; then all ranks cut a step in the same way

    @property
    def num_own_samples(self) -> int:
        """Return the number of this rank's samples."""
        return sum(micro_batch.num_samples for micro_batch in self.micro_batches if not micro_batch.is_padding)


class Task(Protocol):
    """The meaning of the outputs: the loss and the metrics. All values are SUMS over samples, shape ().

    A sum is divided by the number of samples. If a value is a pair (sum, weight), the sum is divided by its weight, for
    example by the number of tokens that count. The weights of a step are first added up over the whole global batch. A task
    with `loss_weight(targets)`, the weight of a micro-batch's loss, returns the sum of the losses alone: so the factor of a
    step's losses is known before its first forward, and no gradient is multiplied afterwards.
    """

    def loss(self, outputs: Any, targets: Any) -> Value: ...

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Value]: ...

    # A task may also have: `step(call, batch, context)`, which replaces one forward and `loss`, and with it
    # `loss_of_rows(own, everyone, batch, context)`, a loss of the results for all samples (framework/engine/own_step.py);
    # `derived(means) -> dict[str, float]`; `predictions(outputs, targets)`, the arguments of a metric's update(), as a tuple or
    # a mapping of names; `written(outputs) -> dict[str, Tensor]`, what mode=predict writes for a batch; `compile_loss()`, which
    # trainer.compile=true calls; `takes_16_bits = True`: in training, its loss takes outputs in the dtype of autocast.


def says_itself(task: Task, name: str) -> bool:
    """Return whether the task's own class, not a base class, sets this to True: a subclass may use outputs differently."""
    return bool(vars(type(task)).get(name, False))


@dataclass(frozen=True)
class Demands:
    """A run's demands on its strategy, in addition to running the model. The strategy's `problems` may refuse them."""

    eval_every: int | None  # in optimizer steps; null = only at the end
    checkpoint_every: int | None
    sync_batchnorm: bool
    averages: tuple[str, object] | None  # the key of the option that averages the weights, and its value
    grad_noise: float | None
    scales_loss: bool
    recovers: str | None  # skip or rollback, after a step that is not finite
    bitwise: bool
    own_step: bool = False  # the task has its own step
    turns: bool = False  # a step has turns
    observes: str | None = None  # the key (metric, mode, part.NAME) of what needs the model's outputs for whole samples
    parts: tuple[str, ...] = ()  # the names of the run's parts
    keep_best: int = 0  # checkpoints
    averages_itself: bool = False  # the optimizer does: it must hold all parameters that are evaluated


Observe = Callable[[Tree, MicroBatch], None]


class Engine(ABC):
    """A model under a strategy. All methods are collective: every rank calls them, in the same order.

    `module` holds this rank's parameters (plain tensors or DTensor shards) under the model's own names. `task` is the task if
    it is a module: its buffers are state, like the model's buffers. The methods with a body here are right for every engine
    that does not measure, and with ranks that do not train separately.
    """

    module: nn.Module
    task: nn.Module | None
    mesh: "DeviceMesh | None"
    dp_rank: int
    dp_size: int
    observers: list[Observe]  # called with the outputs of each micro-batch of an evaluation that counts, on one of its ranks
    parts: Mapping[str, Any] = {}  # the strategy's own parts of the loop, which are called after the user's

    @abstractmethod
    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        """Put into `.grad` the gradient of the global batch's mean loss, times `loss_scale`.

        The mean is the sum divided by the number of samples, or by the weight if the loss has a weight. `index` is the number
        of the step. Return this rank's sums over its samples: the loss, and with `measure` the task's metrics.
        """

    @abstractmethod
    def forward(self, micro_batch: MicroBatch) -> Sums:
        """Evaluate: return the same sums, without gradients; all are zero for padding."""

    def evaluate(self, step: Step) -> Sums:
        """Evaluate this rank's part of a batch: return the sums over this part."""
        sums: Sums = {}
        for micro_batch in step.micro_batches:
            add(sums, self.forward(micro_batch))
        return sums

    @property
    @abstractmethod
    def is_padding(self) -> bool:
        """Whether the current micro-batch has weight zero: a repetition that lets every rank run the same collectives."""

    @abstractmethod
    def outputs(self, inputs: Tree) -> Tree:
        """Return the model's outputs for inputs that are the same on every rank, without gradients.

        Unfit if no rank has the outputs of the whole model.
        """

    @abstractmethod
    def use_average(self, average: Average | None) -> None:
        """Let a task's own step also call the model with these weights."""

    @property
    @abstractmethod
    def trail(self) -> int:
        """A number below 2^52 for what this rank has run, if all ranks must run the same. The loop compares the numbers."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Scale the gradients so that their global L2 norm is at most `max_norm`; return the norm before scaling, shape ()."""

    def warm_up(self, step: Step) -> None:
        """Do once, before the first step, the work that must not happen in the step. It must not change the model."""
        return

    @abstractmethod
    def sync_buffers(self) -> None:
        """Give every rank the buffers (running statistics) that followed micro-batch 0."""

    @abstractmethod
    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        """Build the optimizer of the parameters that this rank updates. `trained` are the parameters in `module`."""


def no_whole_outputs() -> Unfit:
    """Return the error of an engine whose ranks each have a part of the outputs."""
    return Unfit("parallel: no process has the outputs of the whole model, which a part of the run needs (ddp or fsdp)")


def weigh_gradients(module: nn.Module, sums: Sums, *, num_samples: int, among_ranks: bool) -> None:
    """Divide the gradients by the weight of the loss, if it has a weight, instead of the number of samples.

    For a loss with a weight that only `loss` knows. With `among_ranks`, the weight of all ranks (collective); else this rank's
    own weight. A weight of zero leaves no gradient.
    """
    if (weight := sums.get(weight_of("loss"))) is None:
        return
    if among_ranks:
        weight = weight.clone()
        dist.all_reduce(weight)
    factor = torch.where(weight > 0, num_samples / weight, 0.0)
    if factor.device.type != "cpu" or factor != 1.0:  # do not compare a number on a GPU: the comparison would wait for the GPU
        for gradients in by_mesh(p.grad for p in nn.Module.parameters(module) if p.grad is not None):
            # CUDA would multiply the gradients one by one by a factor of another dtype
            for kind in {(gradient.device, gradient.dtype) for gradient in gradients}:
                multiply_all([g for g in gradients if (g.device, g.dtype) == kind], factor.to(*kind))
