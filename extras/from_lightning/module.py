"""A LightningModule whose methods this framework calls: what it logs and asks of its trainer goes to a `Driver`."""

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from extras.from_lightning.callbacks import refusal
from extras.from_lightning.driver import STEPS, Driver, FromTrainer, Scheduler, StepTaken
from extras.from_lightning.frozen import unfreezing
from extras.from_lightning.packages import lightning_class
from framework.runtime.exits import Unfit

CALLED = {  # the hooks that are called, of all that a LightningModule can have
    "training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "setup", "configure_model",
    "configure_callbacks",
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end",
    "on_test_start", "on_test_end", "on_test_epoch_start", "on_test_epoch_end", "on_after_backward",
    "on_after_batch_transfer", "on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step", "on_before_zero_grad",
    "optimizer_step", "configure_gradient_clipping", "lr_scheduler_step", "on_save_checkpoint", "on_load_checkpoint",
}  # fmt: skip
NOT_NEEDED = {"forward", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
              "on_predict_start", "on_predict_end", "on_predict_epoch_start", "on_predict_epoch_end", "teardown",
              "optimizer_zero_grad"}  # fmt: skip
SKIPPED = "skipped"  # the name of what `drive` returns for a training_step that returns None
_OF_LIGHTNING = ("LightningModule", "ModelHooks", "DataHooks", "CheckpointHooks")


def driven(module: Callable[[], Any], *, early_stopping: Mapping[str, Any] | None = None) -> Any:
    """Return a LightningModule that `drive` can call. ValueError with what of it would not be called.

    `early_stopping`: the run's keys, which its callbacks must agree with. None: they are not looked at.
    """
    made = module()
    if lightning_class(type(made), "LightningModule") is None:
        raise ValueError(f"model.module: a {type(made).__name__} (a LightningModule)")
    if odd := _not_called(type(made)):
        what = f"{type(made).__name__} overrides {', '.join(odd)}, which this framework does not call"
        raise ValueError(f"model.module: {what} (trainer.*, part=... or a task of your own: extras/from_lightning/README.md)")
    if found := unfreezing(made):
        raise ValueError(f"model.module: {found}")
    made.__class__ = type(type(made).__name__, (_Driven, type(made)), {"__module__": type(made).__module__})
    made.trainer = FromTrainer(model=made)
    made.configure_model()
    made.setup("fit")
    if early_stopping is not None and (odd_one := refusal(made, early_stopping=early_stopping)):
        raise ValueError(f"model.module: configure_callbacks returns {odd_one}")
    vars(made)["_in_eval"] = [part for part in made.modules() if not part.training]  # which its author has put there
    return made


def has_own(module: Any, method: str) -> bool:
    """Return whether a LightningModule defines a method itself."""
    return getattr(type(module), method) is not getattr(lightning_class(type(module), "LightningModule"), method)


def takes_number(module: Any) -> bool:
    """Return whether the training_step is called for each optimizer, with its number, as in Lightning 1."""
    return "optimizer_idx" in inspect.signature(module.training_step).parameters


@functools.cache
def may_skip(kind: type) -> bool:
    """Return whether the training_step of a class shows a `return None`, no `return` at its end, or cannot be read."""
    try:
        (step,) = ast.parse(textwrap.dedent(inspect.getsource(kind.training_step))).body  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError):
        return True
    returned = [node.value for node in ast.walk(step) if isinstance(node, ast.Return)]
    constants = [node for value in returned if value is not None for node in ast.walk(value) if isinstance(node, ast.Constant)]
    ends = isinstance(step, ast.FunctionDef) and isinstance(step.body[-1], (ast.Return, ast.Raise))
    return not ends or None in returned or any(node.value is None for node in constants)


def metrics_of(module: Any) -> list[Metric]:
    return [part for part in module.modules() if isinstance(part, Metric)]


def _state_of(metric: Metric) -> dict[str, Any]:
    state = {name: [*value] if isinstance(value, list) else value.clone() for name, value in metric.metric_state.items()}
    return state | {"_update_count": metric._update_count, "_computed": metric._computed}


def _not_called(kind: type) -> list[str]:
    theirs = lightning_class(kind, "LightningModule")
    bases = [base for base in theirs.__mro__ if base.__name__ in _OF_LIGHTNING]
    hooks = {name for base in bases for name in vars(base) if name[0] != "_" and callable(getattr(theirs, name))}
    own = {name for base in kind.__mro__ if base not in theirs.__mro__ for name in vars(base)}
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

    def _nothing(self) -> Tensor:
        """Return a zero that gives each whole parameter a gradient: a strategy may wait for all of them."""
        trained = [p for p in nn.Module.parameters(self) if p.requires_grad and not isinstance(p, DTensor)]  # type: ignore[arg-type]
        return sum((p.sum() * 0.0 for p in trained), torch.zeros((), device=self.device, requires_grad=True))

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
        driver.module = driver.trainer.logger.module = self
        kept = [(metric, _state_of(metric)) for metric in metrics_of(self)] if driver.is_padding else []
        try:
            is_indexed = "optimizer_idx" in parameters
            given = arguments if takes_all else arguments[: len(taken) - is_indexed]
            found = self._for_each(driver, run, given) if is_indexed else run(*given)
            if method != "training_step" or driver.is_measuring:
                return found
            if not driver.module.automatic_optimization:
                raise StepTaken
            return {SKIPPED: self._nothing()} if found is None else found
        except StepTaken:
            return [*driver.losses]  # a strategy must see in the outputs what is differentiated
        finally:
            self._driver = None
            for metric, state in kept:
                if metric._computed is not state["_computed"]:
                    state["_computed"] = None  # another rank has updated it, and compute() waits for all ranks
                for name, value in state.items():
                    setattr(metric, name, value)

    @staticmethod
    def _for_each(driver: Driver, run: Callable[..., Any], given: Sequence[Any]) -> Any:
        """Call a method of Lightning 1 for the optimizer of the turn. In an evaluation, return the sum of the losses of all."""
        if not driver.trainer.optimizers:
            driver.prepare()
        place = [*inspect.signature(run).parameters].index("optimizer_idx")
        numbers = [driver.turns.index(driver.turn)] if driver.turn in driver.turns else range(len(driver.turns))
        found = [run(*given[:place], number, *given[place:]) for number in numbers]
        losses = [one.get("loss") if isinstance(one, Mapping) else one for one in found]
        return found[0] if len(found) == 1 else sum(loss for loss in losses if loss is not None)

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
        found = [Scheduler(driver, number) for number in driver.rates.scheduled]
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
