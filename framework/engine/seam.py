"""What the loop, the tasks and the strategies give each other: micro-batches, steps, sums, and what a run demands."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from framework.engine.sums import Number, Value
from framework.modules.tensors import Tree, map_tensors


class MicroBatch(NamedTuple):
    """The samples that go through the model at once. `number` is the place in the global batch; it seeds random draws."""

    number: int
    inputs: Tree
    targets: Tree
    num_samples: int
    start: int  # the index of its first sample in the global batch
    is_padding: bool = False  # has weight zero: it lets every rank run the same collectives
    drawn: Mapping[str, Any] = {}  # the arguments of the dataset's transform, until it is done
    samples: Sequence[int] = ()  # their numbers in the stored data, for messages
    split: str = ""
    weight: Number | None = None  # of its loss, if the task tells it before the forward
    num_tokens: Sequence[int] = ()  # on each process of a context-parallel group, if the tokens are cut

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Return the micro-batch with `function` applied to each of its tensors."""
        return self._replace(inputs=map_tensors(function, self.inputs), targets=map_tensors(function, self.targets))


class Step(NamedTuple):
    """This rank's part of one global batch."""

    epoch: int
    num_samples: int  # of the global batch, over all ranks
    micro_batches: Sequence[MicroBatch]
    turn: str = ""  # the turn whose parameters it moves; empty: all parameters
    targets: Tree = None  # of the global batch, on the CPU, if every rank knows them; None: a rank knows only its own
    batch: int = 0  # its number in the epoch, or in the evaluation
    mark: dict[str, Any] | None = None  # of a stream: its place before this step

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
    # `derived(means) -> dict[str, float]`; `measured(engine) -> dict[str, float]`, columns at the end of an evaluation
    # (collective); `parts`, parts of the loop by name; `predictions(outputs, targets)`, the arguments of a metric's update(),
    # as a tuple or a mapping of names; `written(outputs) -> dict[str, Tensor]`, what mode=predict writes for a batch, and
    # `predict(call, batch, context)`, the outputs that it writes, if they are not those of the forward;
    # `compile_loss()`, which trainer.compile=true calls; `source`, the function that computes the loss, for messages;
    # `takes_16_bits = True`: in training, its loss takes outputs in the dtype of autocast; `evaluates_in_training_mode = True`:
    # the model stays in training mode in evaluations.


def says_itself(task: Task, name: str) -> bool:
    """Return whether the task's own class, not a base class, sets this to True: a subclass may use outputs differently."""
    return bool(vars(type(task)).get(name, False))


@dataclass(frozen=True)
class Demands:
    """A run's demands on its strategy, in addition to running the model. The strategy's `problems` may refuse them."""

    eval_every: int | str | None  # optimizer steps, or a number with another unit; null = only at the end
    checkpoint_every: int | str | None
    sync_batchnorm: bool
    averages: tuple[str, object] | None  # the key of the option that averages the weights, and its value
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
