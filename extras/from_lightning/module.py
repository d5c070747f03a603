"""A LightningModule whose methods this framework calls: what it logs and asks of its trainer goes to a `Driver`."""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from extras.from_lightning.logger import Logger
from extras.from_lightning.rates import Rates
from framework.runtime.exits import Unfit

STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}  # by split
CALLED = {  # the hooks that are called, of all that a LightningModule can have
    "training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "setup", "configure_model",
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end",
    "on_test_start", "on_test_end", "on_test_epoch_start", "on_test_epoch_end", "on_after_backward",
    "on_after_batch_transfer", "on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step", "on_before_zero_grad",
    "optimizer_step", "configure_gradient_clipping", "lr_scheduler_step", "on_save_checkpoint", "on_load_checkpoint",
}  # fmt: skip
NOT_NEEDED = {"forward", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
              "on_predict_start", "on_predict_end", "on_predict_epoch_start", "on_predict_epoch_end", "teardown",
              "optimizer_zero_grad"}  # fmt: skip
_OF_LIGHTNING = ("LightningModule", "ModelHooks", "DataHooks", "CheckpointHooks")


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
    datamodule: Any = field(init=False)  # the LightningDataModule, in training

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
    totals: dict[str, Tensor] = field(default_factory=dict)  # of an evaluation, on this rank: a sum and its weight, by name
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
            raise Unfit("task: training_step steps an optimizer without self.manual_backward(loss) (not loss.backward())")
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


class _Scheduler:
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


def driven(module: Callable[[], Any]) -> LightningModule:
    """Return a LightningModule that `drive` can call. ValueError with what of it would not be called."""
    made = module()
    if not isinstance(made, LightningModule):
        raise ValueError(f"model.module: a {type(made).__name__} (a LightningModule)")
    if odd := _not_called(type(made)):
        what = f"{type(made).__name__} overrides {', '.join(odd)}, which this framework does not call"
        raise ValueError(f"model.module: {what} (trainer.*, part=... or a task of your own: extras/from_lightning/README.md)")
    made.__class__ = type(type(made).__name__, (_Driven, type(made)), {"__module__": type(made).__module__})
    made.trainer = FromTrainer(model=made)  # type: ignore[assignment]
    made.configure_model()
    made.setup("fit")
    vars(made)["_in_eval"] = [part for part in made.modules() if not part.training]  # which its author has put there
    return made


def has_own(module: Any, method: str) -> bool:
    """Return whether a LightningModule defines a method itself."""
    return getattr(type(module), method) is not getattr(LightningModule, method)


def metrics_of(module: Any) -> list[Metric]:
    return [part for part in module.modules() if isinstance(part, Metric)]


def _state_of(metric: Metric) -> dict[str, Any]:
    state = {name: [*value] if isinstance(value, list) else value.clone() for name, value in metric.metric_state.items()}
    return state | {"_update_count": metric._update_count, "_computed": metric._computed}


def _not_called(kind: type) -> list[str]:
    bases = [base for base in LightningModule.__mro__ if base.__name__ in _OF_LIGHTNING]
    hooks = {name for base in bases for name in vars(base) if name[0] != "_" and callable(getattr(LightningModule, name))}
    own = {name for base in kind.__mro__ if base not in LightningModule.__mro__ for name in vars(base)}
    return sorted(own & hooks - CALLED - NOT_NEEDED)


class _Driven:
    """What replaces methods of a LightningModule."""

    _driver: Driver | None = None
    _in_eval: Sequence[Any] = ()

    @property
    def dtype(self) -> torch.dtype:
        return next(self._floats()).dtype

    @property
    def device(self) -> torch.device:
        return next(self._floats()).device

    def _floats(self) -> Iterator[Tensor]:
        """Yield the module's tensors of floating-point numbers; a CPU tensor, if it has none."""
        tensors = itertools.chain(nn.Module.parameters(self), nn.Module.buffers(self))  # type: ignore[arg-type]
        yield from filter(torch.is_floating_point, tensors)
        yield torch.empty(0)

    def train(self, mode: bool = True) -> Any:
        """Keep the modules in eval mode that were made so, as Lightning does."""
        found = super().train(mode)  # type: ignore[misc]
        for part in self._in_eval:
            part.training = False
        return found

    def drive(self, driver: Driver, method: str, *arguments: Any) -> Any:
        """Call a method with as many of the arguments as it takes. The model's forward is replaced by this call."""
        if method in STEPS.values():  # a module without a test_step has its validation_step, and without that its training_step
            method = next(name for name in (method, "validation_step", "training_step") if has_own(self, name))
        if method == "predict_step" and not has_own(self, method):
            return self(arguments[0][0] if isinstance(arguments[0], list) else arguments[0])  # type: ignore[operator]
        run = getattr(self, method)
        parameters = inspect.signature(run).parameters
        taken = parameters.values()
        takes_all = any(one.kind is one.VAR_POSITIONAL for one in taken)
        if method in (*STEPS.values(), "predict_step"):
            moved: Callable[..., Any] = getattr(self, "on_after_batch_transfer")  # noqa: B009  # of the LightningModule
            number = driver.loader_number
            arguments = (moved(arguments[0], number), *arguments[1:], *([number] if "dataloader_idx" in parameters else []))
        self._driver = driver
        self.trainer, driver.trainer.model = driver.trainer, self  # also the trainer of the modules in it
        driver.module = self
        kept = [(metric, _state_of(metric)) for metric in metrics_of(self)] if driver.is_padding else []
        try:
            return run(*(arguments if takes_all else arguments[: len(taken)]))
        except StepTaken:
            return None
        finally:
            self._driver = None
            for metric, state in kept:
                if metric._computed is not state["_computed"]:
                    state["_computed"] = None  # another rank has updated it, and compute() waits for all ranks
                for name, value in state.items():
                    setattr(metric, name, value)

    def log(self, name: str, value: Any, *_: Any, reduce_fx: Any = "mean", batch_size: int | None = None, **__: Any) -> None:
        driver = self._driver
        if driver is None:
            return
        name = re.sub("^(train|val|test)/", "", name)  # the row tells the split
        if isinstance(value, Metric):
            driver.metrics[name] = value
        elif reduce_fx not in ("mean", torch.mean):
            raise Unfit(f"task: log({name!r}, reduce_fx=...) (a mean over the samples; or a metric of torchmetrics)")
        else:
            driver.logged[name] = value, batch_size

    def print(self, *args: Any, **named: Any) -> None:
        print(*args, **named)

    def log_dict(self, dictionary: Any, *given: Any, **named: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *given, **named)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        found = self._driving("optimizers").trainer.optimizers
        return found if len(found) > 1 else found[0]

    def lr_schedulers(self) -> Any:
        driver = self._driving("lr_schedulers")
        found = [_Scheduler(driver, number) for number in driver.rates.scheduled]
        return found if len(found) > 1 else found[0] if found else None

    def manual_backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        self._driving("manual_backward").losses.append(loss)

    def toggle_optimizer(self, *_: Any, **__: Any) -> None:
        """Do nothing: a turn moves its own parameters alone."""

    def untoggle_optimizer(self, *_: Any, **__: Any) -> None:
        pass

    def clip_gradients(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None) -> None:
        self._driving("clip_gradients").clips(optimizer.number, gradient_clip_val, gradient_clip_algorithm)

    def _driving(self, method: str) -> Driver:
        if self._driver is None:
            raise Unfit(f"task: {method}() is called outside of a step (in training_step, or in a hook)")
        if not self._driver.trainer.optimizers:
            self._driver.prepare()
        return self._driver


def optimizers_of(driver: Driver) -> list[Any]:
    """Return what stands for the run's optimizers in the methods of a module."""
    return [_Optimizer(driver, number) for number in range(len(driver.turns))]
