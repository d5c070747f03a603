"""What a call of a LightningModule's method gives and takes besides its arguments: its trainer, optimizers and schedulers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from extras.from_lightning.logger import Logger
from extras.from_lightning.rates import Rates
from framework.runtime.exits import Unfit

STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}  # by split


class Validated(dict[str, Tensor]):
    """The columns of the last validation, or of the one that ends, as `callback_metrics`."""

    def __missing__(self, name: str) -> Tensor:
        there = ", ".join(self) or "nothing yet"
        raise Unfit(f"task: callback_metrics[{name!r}] is not there: it has the last validation ({there})")


class StepTaken(Exception):
    """The optimizer whose turn it is has been stepped: the rest of the training_step belongs to other turns."""


@dataclass(eq=False, slots=True)
class FromTrainer:
    """What a LightningModule can read from `self.trainer`: nothing in it depends on how a run is executed.

    It can set `should_stop`.
    """

    global_step: int = 0
    current_epoch: int = 0
    max_epochs: int | None = None
    max_steps: int = -1
    num_steps: int | None = None  # what estimated_stepping_batches is; None: not known here
    num_training_batches: int = 1
    is_last_batch: bool = False  # of an epoch
    should_stop: bool = False
    callback_metrics: Mapping[str, Tensor] = field(default_factory=Validated)
    optimizers: Sequence[Any] = ()  # in a training run
    training: bool = True
    validating: bool = False
    testing: bool = False
    sanity_checking: bool = False
    predicting: bool = False
    is_global_zero: bool = True  # on every rank: what only one rank computes would not be a part of the model
    global_rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_nodes: int = 1
    num_devices: int = 1
    accumulate_grad_batches: int = 1
    logger: Logger = field(default_factory=Logger)
    default_root_dir: str = ""  # the directory of a training run
    callbacks: Sequence[Any] = ()
    model: Any = None  # the LightningModule
    datamodule: Any = None  # the LightningDataModule, in training

    @property
    def evaluating(self) -> bool:
        return self.validating or self.testing

    @property
    def loggers(self) -> list[Logger]:
        return [self.logger]

    @property
    def log_dir(self) -> str:
        return self.logger.log_dir

    @property
    def estimated_stepping_batches(self) -> int:
        if self.num_steps is None:
            what = "trainer.estimated_stepping_batches is not known to a scheduler that steps by epochs"
            raise ValueError(f"module: {what} (interval: step, or trainer.max_epochs)")
        return self.num_steps

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"self.trainer.{name}: a run of this framework has no such value (docs: extras/from_lightning)")


@dataclass(eq=False)
class Driver:
    """What a call of a LightningModule's method gives and takes besides its arguments."""

    trainer: FromTrainer
    logged: dict[str, tuple[Any, int | None]] = field(default_factory=dict)  # values by name, with batch_size
    earlier: set[str] = field(default_factory=set)  # the names of values from earlier turns of the step
    metrics: dict[str, Metric] = field(default_factory=dict)  # that were logged as objects, by name
    totals: dict[str, tuple[Any, int]] = field(default_factory=dict)  # of an evaluation, on this rank: sums and weights
    measured: dict[int, Metric] = field(default_factory=dict)  # that earlier sets of this validation have logged, by id
    split: str = "train"
    validations: Sequence[str] = ()  # the names of the validation splits, where a run's loop goes through them
    is_evaluating: bool = False  # the hooks at the start of an evaluation have been called, and not yet those at its end
    module: Any = None  # the LightningModule that was called last
    is_padding: bool = False  # the batch does not count
    turns: Sequence[str] = ("",)  # the names of the optimizers, if there are several
    order: Sequence[int] = (0,)  # the numbers of the optimizers, in the order in which a step takes them
    turn: str = ""
    rates: Rates = field(default_factory=Rates)
    prepare: Callable[[], None] = lambda: None  # sets `rates` and the trainer's `optimizers`
    clip: tuple[float, str] | None = None  # what the optimizer of the turn clips its gradients to, and how
    is_measuring: bool = False  # a batch of an evaluation, perhaps by the training_step: nothing of the optimizers moves
    has_stepped: bool = False  # the module's own optimizer_step has stepped the optimizer
    losses: list[Tensor] = field(default_factory=list)  # given to manual_backward for the optimizer of the turn
    taken: int = 0  # optimizers that the training_step has stepped or left out
    num_calls: int = 0  # of training_step in this step
    num_skipped: int = 0  # of these calls: they have returned None
    is_done: bool = False  # whether the optimizer of the turn is among them

    @property
    def loader_number(self) -> int:
        """The number of the split's loader. Unfit if the split has another name."""
        name = self.split.partition(".")[2]
        if name and not name.isdigit():
            what = "a LightningModule gets the number of a validation set"
            raise Unfit(f"dataset.val.{name}: {what} (dataset.val.0=..., dataset.val.1=...)")
        return int(name or 0)

    def reset(self) -> None:
        """Reset the metrics that were logged as objects: their values are of one step or one validation."""
        for metric in (*self.metrics.values(), *self.measured.values()):
            metric.reset()
        self.metrics.clear()
        self.measured.clear()

    def values(self) -> dict[str, float]:
        """Return the values of the metrics that this split has logged, over what all ranks have seen. Collective."""
        found = {name: float(metric.compute()) for name, metric in self.metrics.items()}
        self.measured |= {id(metric): metric for metric in self.metrics.values()}
        self.metrics.clear()
        return found

    def stepped(self, number: int) -> None:
        """Note that an optimizer is stepped, in the training_step or in the module's own optimizer_step."""
        if self.is_measuring:
            return
        if self.module.automatic_optimization:
            self.rates.take(number)
            self.has_stepped = True
            return
        place = self.order.index(number)
        if place < self.taken:
            what = f"training_step steps optimizer {number} after optimizer {self.order[self.taken - 1]}"
            raise Unfit(f"task: {what} (configure_optimizers returns them in the order in which a step uses them, each once)")
        is_own = self.turns[number] == self.turn
        if is_own and not self.losses:
            cure = "not loss.backward(); for one loss of several optimizers, one optimizer with a group for each"
            raise Unfit(f"task: training_step steps an optimizer without self.manual_backward(loss) since the last ({cure})")
        self.taken, self.is_done = place + 1, self.is_done or is_own
        if not is_own:
            self.losses.clear()
            return
        self.rates.take(number)
        if number != self.order[-1]:
            raise StepTaken

    def clips(self, number: int, value: float | None, kind: str | None) -> None:
        """Note to what an optimizer clips its gradients."""
        if value and self.turns[number] == self.turn:
            self.clip = float(value), str(kind or "norm")


class _Optimizer:
    """The optimizer that the methods of a module get: the run's optimizer follows when the gradients are complete."""

    def __init__(self, driver: Driver, number: int) -> None:
        self._driver, self.number = driver, number

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> None:
        if closure is not None:
            closure()
        self._driver.stepped(self.number)

    def zero_grad(self, *_: Any, **__: Any) -> None:
        pass

    def toggle_model(self, *_: Any, **__: Any) -> Any:
        return nullcontext()  # a turn moves its own parameters alone

    @property
    def param_groups(self) -> Any:
        found = self._driver.rates.groups(self.number)
        return [dict(group) for group in found] if self._driver.is_measuring else found


class Scheduler:
    """The scheduler that the methods of a module get: it takes its steps after those of the optimizers."""

    def __init__(self, driver: Driver, number: int) -> None:
        self._driver, self._number = driver, number
        self._followed = driver.rates.scheduler(number)

    @property  # type: ignore[misc]  # mypy: an object's class can be set
    def __class__(self) -> Any:  # what isinstance() sees
        return type(self._followed)

    def step(self, *given: Any, **named: Any) -> None:
        if not self._driver.is_measuring:
            self._driver.rates.waiting.append((self._number, given, named))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._followed, name)


def optimizers_of(driver: Driver) -> list[Any]:
    """Return what stands for the run's optimizers in the methods of a module."""
    return [_Optimizer(driver, number) for number in range(len(driver.turns))]
