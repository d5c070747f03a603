"""The steps of a LightningModule as a task of this framework."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from extras.from_lightning.module import STEPS, Driver, FromTrainer, metrics_of
from extras.from_lightning.optimizers import Plateau, configured_by, names_of_turns
from framework.engine.engine import Engine
from framework.runtime.exits import Unfit
from framework.training.loop_view import Loop


class Task:
    """Its training_step, validation_step and test_step; each returns a mean over the samples of its batch."""

    def __init__(self, module: Callable[[], Any]) -> None:
        self.driver = Driver(FromTrainer())
        self.parts = {"hooks": Hooks(self.driver, module)}

    def step(self, call: Any, batch: Any, context: Any) -> dict[str, Any]:
        driver, trainer, is_training = self.driver, self.driver.trainer, context.is_training
        trainer.global_step, trainer.current_epoch = context.step, context.epoch
        trainer.training, trainer.validating, trainer.testing = is_training, context.split == "val", context.split == "test"
        driver.logged.clear()
        driver.prefix = f"{context.split}/"
        driver.turn, driver.taken, driver.is_padding = context.turn, 0, context.is_padding
        driver.losses.clear()
        if context.turn:  # so that all turns of a step see the same noise, as one training_step does
            seeds = context.generator_of_step
            torch.manual_seed(int(torch.randint(2**62, (), generator=seeds, device=seeds.device)))
        given = [batch.inputs, batch.targets] if batch.targets is not None else batch.inputs
        found = call.drive(driver, STEPS[context.split or "train"], given, context.batch)
        count = context.size
        new = {name: given for name, given in driver.logged.items() if name not in driver.earlier}
        columns = {name: _weighted(value, size or count) for name, (value, size) in new.items()}
        return columns | {"loss": _weighted(self._loss(found, context), count)}

    @property
    def source(self) -> Any:
        """What computes the loss, for messages."""
        return getattr(self.driver.module, "training_step", None)

    def _loss(self, found: Any, context: Any) -> Any:
        driver, step = self.driver, STEPS[context.split or "train"]
        if context.is_training and not driver.module.automatic_optimization:  # an optimizer that is left out has no loss
            return sum(driver.losses[1:], driver.losses[0]) if driver.losses else torch.zeros((), requires_grad=True)
        if context.turn:
            raise Unfit("task: several optimizers, but the module's automatic_optimization is true (it steps them itself)")
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if loss is None and not context.is_training:
            loss = next((value for name, (value, _) in driver.logged.items() if "loss" in name), None)
        if loss is None:
            raise Unfit(
                f"task: {step} returns no loss{'' if context.is_training else ', and logs none'} (a mean over its batch)"
            )
        return loss

    def measured(self, engine: Engine) -> dict[str, float]:
        """Call the hooks at the end of an evaluation; return what they log, and the values of metrics that were logged."""
        driver = self.driver
        name = "test" if driver.trainer.testing else "validation"
        driver.logged.clear()
        driver.is_padding = False
        for metric in metrics_of(driver.module):  # also where no loop has begun
            metric.process_group = engine.data_group
        for hook in (f"on_{name}_epoch_end", f"on_{name}_end"):
            driver.module.drive(driver, hook)
        return {name: float(value) for name, (value, _) in driver.logged.items()} | values_of(driver.metrics)


def values_of(metrics: dict[str, Metric]) -> dict[str, float]:
    """Return the values of metrics, over what all ranks have seen since their last reset, and reset them. Collective."""
    found = {name: float(metric.compute()) for name, metric in metrics.items()}
    for metric in metrics.values():
        metric.reset()
    metrics.clear()
    return found


def _weighted(value: Any, count: int) -> tuple[Any, int]:
    mean = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return mean.reshape(()) * count, count


class Hooks:
    """The hooks of a LightningModule as a part of the loop, and the state of metrics that live longer than an evaluation."""

    def __init__(self, driver: Driver, module: Callable[[], Any]) -> None:
        self.driver, self._make = driver, module
        self._columns: dict[str, float] = {}  # that hooks have logged in this step
        self._metrics: dict[str, Metric] = {}
        self._plateau = Plateau([])

    def begun(self, loop: Loop) -> None:
        order, trainer = loop.splits.loader("train").order, self.driver.trainer
        self.steps_per_epoch = trainer.num_training_batches = -(-order.epoch_size // order.global_batch_size)
        trainer.estimated_stepping_batches = trainer.max_steps = loop.total_steps
        trainer.max_epochs = -(-loop.total_steps // self.steps_per_epoch)
        configured = configured_by(self._make, max_epochs=trainer.max_epochs, estimated_stepping_batches=loop.total_steps)
        self._plateau = Plateau(configured)
        self.driver.turns = names_of_turns(configured) if len(configured) > 1 else [""]
        self._metrics = {name: part for name, part in loop.module.named_modules() if isinstance(part, Metric)}
        for metric in self._metrics.values():
            metric.process_group = loop.engine.data_group
        self._call(loop, "on_fit_start", "on_train_start")

    def step_begun(self, loop: Loop) -> None:
        self._reset()
        self._columns.clear()
        self.driver.earlier.clear()
        loop.lr_share = self._plateau.share
        if loop.step % self.steps_per_epoch == 0:
            self._call(loop, "on_train_epoch_start")
        self._call(loop, "on_train_batch_start", given=(None, loop.step % self.steps_per_epoch))

    def gradients_ready(self, loop: Loop) -> None:
        if loop.turn and loop.turn != self.driver.turns[-1]:  # the last turn runs the whole training_step
            self._reset()
        self.driver.earlier |= self.driver.logged.keys()
        self._call(loop, "on_after_backward")
        self._call(loop, "on_before_optimizer_step", given=(loop.optimizer,))

    def step_taken(self, loop: Loop) -> None:
        number = (loop.step - 1) % self.steps_per_epoch
        self.driver.logged.clear()
        self._call(loop, "on_train_batch_end", given=(None, None, number))
        self._call(loop, "on_before_zero_grad", given=(loop.optimizer,))
        if number == self.steps_per_epoch - 1:
            self._call(loop, "on_train_epoch_end")
        self._columns = {name: float(value) for name, (value, _) in self.driver.logged.items()}

    def row(self, loop: Loop) -> dict[str, float]:
        return self._columns | values_of(self.driver.metrics)

    def evaluating(self, loop: Loop, split: str) -> None:
        self._reset()
        name = "test" if split == "test" else "validation"
        self._call(loop, f"on_{name}_start", f"on_{name}_epoch_start")

    def evaluated(self, loop: Loop, split: str, row: Mapping[str, Any]) -> None:
        self._plateau.evaluated(split, row)

    def saving(self, loop: Loop) -> None:
        self._reset()

    def ended(self, loop: Loop) -> None:
        self._call(loop, "on_train_end", "on_fit_end")

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the metrics that the module itself resets, such as the best accuracy of all evaluations."""
        found: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            tensors = {state: value for state, value in metric.metric_state.items() if isinstance(value, Tensor)}
            found |= {f"{name}.{state}": value for state, value in tensors.items()}
            found |= {f"{name}._update_count": metric._update_count} if tensors else {}
        return found | {f"plateau.{name}": value for name, value in self._plateau.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        of_plateau = {key for key in state if key.startswith("plateau.")}
        self._plateau.load_state_dict({key.removeprefix("plateau."): state[key] for key in of_plateau})
        for key, value in ((key, state[key]) for key in state.keys() - of_plateau):
            name, _, attribute = key.rpartition(".")
            setattr(self._metrics[name], attribute, value)

    def _reset(self) -> None:
        """Reset the metrics that were logged as objects: their values are of one step or one evaluation."""
        for metric in self.driver.metrics.values():
            metric.reset()
        self.driver.metrics.clear()

    def _call(self, loop: Loop, *hooks: str, given: tuple[Any, ...] = ()) -> None:
        module: Any = loop.module
        trainer = self.driver.trainer
        trainer.global_step, trainer.current_epoch = loop.step, max(0, loop.step - 1) // self.steps_per_epoch
        self.driver.is_padding = False
        for hook in hooks:
            module.drive(self.driver, hook, *given)
