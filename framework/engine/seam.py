"""The seam between the loop and the strategies: an Engine turns micro-batches into gradients, whatever runs where."""

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
    """What goes through the model at once. `number` counts the micro-batches of the global batch; it seeds randomness."""

    number: int
    inputs: Tree
    targets: Tree
    num_samples: int
    start: int  # the place of its first sample in the global batch
    is_padding: bool = False  # has weight zero: every rank then enters the same collectives
    keys: np.ndarray | None = None  # of its samples' augmentation, until that is done

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Return the micro-batch with `function` applied to each of its tensors."""
        return self._replace(inputs=map_tensors(function, self.inputs), targets=map_tensors(function, self.targets))


class Step(NamedTuple):
    """This rank's part of one global batch."""

    epoch: int
    num_samples: int  # of the global batch, over all ranks
    micro_batches: Sequence[MicroBatch]
    turn: str = ""  # whose parameters it moves; all, if it is empty
    is_last: bool = False  # of the run, as it is planned
    is_even: bool = True  # are all micro-batches of one size, on all ranks? Then all ranks cut a step in the same way

    @property
    def num_own_samples(self) -> int:
        """Return the number of this rank's samples."""
        return sum(micro_batch.num_samples for micro_batch in self.micro_batches if not micro_batch.is_padding)


class Task(Protocol):
    """What the numbers mean: the loss and the metrics. All are SUMS over samples, shape ().

    A sum is divided by the number of samples, or by its own weight if it comes with one, as (sum, weight): by the number of
    tokens that count, for example. The weight of a step is added up over the whole global batch before it divides.
    """

    def loss(self, outputs: Any, targets: Any) -> Value: ...

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Value]: ...

    # It may have `step(call, batch, context)`, which trains in place of one forward and `loss` (framework/engine/own_step.py),
    # `derived(means) -> dict[str, float]`, `predictions(outputs, targets)`: what a metric's update() takes, as a tuple or, by
    # names, a mapping; `written(outputs) -> dict[str, Tensor]`: what mode=predict writes of a batch; `compile_loss()`, called
    # with trainer.compile=true; and `takes_16_bits = True`: in training its loss takes outputs as autocast computed them.


def says_itself(task: Task, name: str) -> bool:
    """Return whether the task's own class, not its base, sets this to True: a subclass may use outputs otherwise."""
    return bool(vars(type(task)).get(name, False))


@dataclass(frozen=True)
class Demands:
    """What a run needs of its strategy, in addition to running the model: the strategy's `problems` may refuse it."""

    eval_every: int | None  # in optimizer steps; null = only at the end
    checkpoint_every: int | None
    sync_batchnorm: bool
    averages: tuple[str, object] | None  # the key of what averages the weights, and its value
    grad_noise: float | None
    scales_loss: bool
    recovers: str | None  # skip or rollback, after a step that is not finite
    bitwise: bool
    own_step: bool = False  # the task's
    turns: bool = False  # of a step
    observes: str | None = None  # the key (metric, mode, part.NAME) of what takes the model's outputs, of whole samples
    parts: tuple[str, ...] = ()  # the names of the run's
    averages_itself: bool = False  # the optimizer: it must hold all parameters that are evaluated


Observe = Callable[[Tree, MicroBatch], None]


class Engine(Protocol):
    """A model under a strategy. Methods are collective: every rank calls them, in the same order.

    `module` holds this rank's parameters (plain tensors or DTensor shards) under the model's own names. `task` is the task if
    it is a module: its buffers are state as the model's are.
    """

    module: nn.Module
    task: nn.Module | None
    mesh: "DeviceMesh | None"
    dp_rank: int
    dp_size: int
    observers: list[Observe]  # take the outputs of each micro-batch of an evaluation that counts, on one of its ranks

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        """Leave in `.grad` the gradient of the global batch's sum of losses, divided by its samples, times `loss_scale`.

        `index` is the number of the step. Returns this rank's sums over its samples: the loss, and with `measure`
        the task's metrics.
        """

    def weigh(self, sums: Sums, *, num_samples: int) -> None:
        """Divide the gradients by the loss's weight, if it has one, in place of the number of samples.

        `sums` are what `forward_backward` has returned.
        """
        weigh_gradients(self.module, sums, num_samples=num_samples, among_ranks=dist.is_initialized())

    def forward(self, micro_batch: MicroBatch) -> Sums:
        """Evaluate: the same sums, without gradients; all zero for padding."""

    def evaluate(self, step: Step) -> Sums:
        """Evaluate this rank's part of a batch: the sums over it."""
        sums: Sums = {}
        for micro_batch in step.micro_batches:
            add(sums, self.forward(micro_batch))
        return sums

    @property
    def is_padding(self) -> bool:
        """Whether the micro-batch under way has weight zero: a repetition, so that every rank enters the same collectives."""
        return False

    def outputs(self, inputs: Tree) -> Tree:
        """Return what the model returns for inputs that are the same on every rank, without gradients.

        Unfit where no rank has the whole model's outputs.
        """
        raise Unfit("parallel: no process has the outputs of the whole model, which a part of the run asks for (ddp or fsdp)")

    def use_average(self, average: Average | None) -> None:
        """Let a task's own step call the model with these weights too."""
        return

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Scale the gradients so that their global L2 norm is at most `max_norm`; return the norm before, shape ()."""

    def warm_up(self, step: Step) -> None:
        """Run once, before the first step, what must not happen in it. Leaves no trace in the model."""
        return

    @property
    def measured(self) -> dict[str, int]:
        """What was measured at the run's start and decides the last bits: each checkpoint has it."""
        return {}

    def take_up(self, measured: Mapping[str, int]) -> None:
        """Go on with what a checkpoint has of it; called before `warm_up`."""
        return

    def sync_buffers(self) -> None:
        """Give every rank the buffers (running statistics) that followed micro-batch 0."""

    def meet(self, step: int, *, is_last: bool) -> bool:
        """Let ranks that train apart agree after this many steps, taken or left out, if it is time; after the last, it is.

        Returns whether any strategy can continue from the state.
        """
        return True

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        """Build the optimizer of what this rank updates. `trained` are the parameters in `module`."""


class EngineAround(Engine):
    """An Engine that passes every call on to the engine inside; a subclass defines the calls that it changes."""

    def __init__(self, engine: Engine) -> None:
        self.module, self.task = engine.module, engine.task
        self.mesh, self.observers = engine.mesh, engine.observers
        self.dp_rank, self.dp_size = engine.dp_rank, engine.dp_size
        self._engine = engine

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        return self._engine.forward_backward(step, index=index, loss_scale=loss_scale, measure=measure)

    def forward(self, micro_batch: MicroBatch) -> Sums:
        return self._engine.forward(micro_batch)

    def evaluate(self, step: Step) -> Sums:
        return self._engine.evaluate(step)

    @property
    def is_padding(self) -> bool:
        return self._engine.is_padding

    def outputs(self, inputs: Tree) -> Tree:
        return self._engine.outputs(inputs)

    def use_average(self, average: Average | None) -> None:
        self._engine.use_average(average)

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        return self._engine.clip_grad_norm(max_norm)

    def weigh(self, sums: Sums, *, num_samples: int) -> None:
        self._engine.weigh(sums, num_samples=num_samples)

    def warm_up(self, step: Step) -> None:
        self._engine.warm_up(step)

    @property
    def measured(self) -> dict[str, int]:
        return self._engine.measured

    def take_up(self, measured: Mapping[str, int]) -> None:
        self._engine.take_up(measured)

    def sync_buffers(self) -> None:
        self._engine.sync_buffers()

    def meet(self, step: int, *, is_last: bool) -> bool:
        return self._engine.meet(step, is_last=is_last)

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        return self._engine.make_optimizer(build, trained)


def weigh_gradients(module: nn.Module, sums: Sums, *, num_samples: int, among_ranks: bool) -> None:
    """Let the weight of the loss, if it has one, divide the gradients in place of the number of samples.

    The weight of all ranks (collective then), or this rank's own. A weight of zero leaves no gradient.
    """
    if (weight := sums.get(weight_of("loss"))) is None:
        return
    if among_ranks:
        weight = weight.clone()
        dist.all_reduce(weight)
    factor = torch.where(weight > 0, num_samples / weight, 0.0)
    if factor.device.type != "cpu" or factor != 1.0:  # of a GPU's number, it would have to be waited for
        for gradients in by_mesh(p.grad for p in module.parameters() if p.grad is not None):
            # a factor of another type would make CUDA multiply the gradients one by one
            for kind in {(gradient.device, gradient.dtype) for gradient in gradients}:
                multiply_all([g for g in gradients if (g.device, g.dtype) == kind], factor.to(*kind))
