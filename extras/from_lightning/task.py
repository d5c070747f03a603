"""The steps of a LightningModule as a task of this framework."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from extras.from_lightning.driver import STEPS, Driver, FromTrainer, Validated
from extras.from_lightning.hooks import Hooks, hooks_of, numbers_of, prepare
from extras.from_lightning.kept import unchanged
from extras.from_lightning.module import SKIPPED, has_own, may_skip, metrics_of, takes_number
from extras.from_lightning.optimizers import configured_by
from framework.engine.engine import Engine
from framework.runtime.exits import Unfit

# The hooks that may read the means of an evaluation.
_ENDS = [hook for split in ("val", "test") for hook in hooks_of(split, "epoch_end", "end")]


_IN_PARTS = (
    "and a loss for the others: what a step leaves out would depend on how it is cut (decide by the batch's number or the "
    "epoch, or give the samples that do not count a weight of 0 in the loss)"
)


class Task:
    """Its training_step, validation_step and test_step; each returns a mean over the samples of its batch."""

    def __init__(self, module: Callable[[], Any]) -> None:
        self.driver, self._make = Driver(FromTrainer()), module
        self.driver.prepare = self._prepare
        self.hooks = Hooks(self.driver, module)
        self.parts = {"hooks": self.hooks}

    def step(self, call: Any, batch: Any, context: Any) -> dict[str, Any]:
        driver, trainer, is_training = self.driver, self.driver.trainer, context.is_training
        if is_training:  # a manual optimization counts the steps of each optimizer
            turn = driver.order.index(driver.turns.index(context.turn))
            trainer.global_step, trainer.current_epoch = context.step * len(driver.turns) + turn, context.epoch
            trainer.is_last_batch = context.batch == trainer.num_training_batches - 1
            if context.turn != driver.turn:
                driver.num_calls = driver.num_skipped = 0
            driver.num_calls += 1
            driver.rates.restart()
        driver.split, split = context.split, _kind(context.split)
        trainer.training, trainer.validating, trainer.testing = is_training, split == "val", split == "test"
        if not is_training and not driver.is_evaluating:  # mode=eval has no parts
            driver.is_evaluating = True
            for hook in hooks_of(driver.split, "start", "epoch_start"):
                call.drive(driver, hook)
        driver.logged.clear()
        driver.turn, driver.taken, driver.is_done, driver.is_padding = context.turn, 0, False, context.is_padding
        driver.losses.clear()
        driver.clip = None
        if context.turn:  # so that all turns of a step see the same noise, as one training_step does
            seeds = context.generator_of_step
            torch.manual_seed(int(torch.randint(2**62, (), generator=seeds, device=seeds.device)))
        driver.is_measuring = not is_training
        has_step = is_training or any(has_own(driver.module, name) for name in (STEPS[split], "validation_step"))
        with nullcontext() if has_step else unchanged(driver.module):
            found = self._drive(call, STEPS[split], batch, context)
            is_skipped = is_training and self._is_skipped(found)
            loss = found[SKIPPED] if is_skipped else self._loss(found, context)
        if loss is None:
            loss = self._training_loss(call, batch, context)
        driver.is_measuring = False
        shared = [name for name, metric in driver.metrics.items() if id(metric) in driver.measured]
        if shared and not is_training:
            what = f"two validation sets log {shared[0]!r} with one metric, whose value would be over both"
            raise Unfit(f"task: {what} (a metric for each set, in a torch.nn.ModuleList)")
        count = context.size
        new = {name: given for name, given in driver.logged.items() if not (is_training and name in driver.earlier)}
        columns = {name: _weighted(value, size or count) for name, (value, size) in new.items()}
        columns["loss"] = (loss, 0) if is_skipped else _weighted(loss, count)
        if not is_training and not context.is_padding and any(has_own(driver.module, hook) for hook in _ENDS):
            for name, (total, weight) in columns.items():
                before, weights = driver.totals.get(name, (0.0, 0))
                total = total.detach() if total.device.type == "mps" else total.detach().double()  # which MPS does not have
                driver.totals[name] = before + total, weights + weight
        return columns

    def _is_skipped(self, found: Any) -> bool:
        """Return whether a training_step has returned None, in place of a loss, on all ranks. Unfit if only on some."""
        driver = self.driver
        if not driver.module.automatic_optimization:
            return False
        is_skipped = isinstance(found, Mapping) and SKIPPED in found
        if dist.is_initialized() and dist.get_world_size() > 1:
            if not may_skip(type(driver.module)):  # type: ignore[arg-type]  # mypy: a type is Hashable
                if not is_skipped:
                    return False
                what = "training_step returns None, which its source does not show (`return None` in the training_step itself)"
                raise Unfit(f"task: {what}")
            if (count := int(self.hooks.sum_over_ranks(is_skipped))) not in (0, dist.get_world_size()):
                raise Unfit(f"task: training_step returns None on {count} of {dist.get_world_size()} processes, {_IN_PARTS}")
        driver.num_skipped += is_skipped
        if driver.num_skipped not in (0, driver.num_calls):
            raise Unfit(f"task: training_step returns None for some micro-batches of a step, {_IN_PARTS}")
        return is_skipped

    def _drive(self, call: Any, method: str, batch: Any, context: Any) -> Any:
        try:
            return call.drive(self.driver, method, _whole(batch), context.batch)
        except RuntimeError as error:
            has_it = method != "training_step" and any(has_own(self.driver.module, one) for one in (method, "validation_step"))
            if has_it or not self.driver.is_measuring or "require grad" not in str(error):
                raise
            what = "its training_step differentiates, so it cannot stand for the validation_step that the module lacks"
            raise Unfit(f"task: {what} (a validation_step)") from error

    def predict(self, call: Any, batch: Any, context: Any) -> Any:
        """Return what the predict_step returns for a batch."""
        self.driver.trainer.training, self.driver.trainer.predicting, self.driver.split = False, True, context.split
        return call.drive(self.driver, "predict_step", _whole(batch), context.batch)

    @property
    def source(self) -> Any:
        """What computes the loss, for messages."""
        return getattr(self.driver.module, "training_step", None)

    def _loss(self, found: Any, context: Any) -> Any:
        """Return the loss of a step. None: an evaluation has returned and logged none."""
        driver = self.driver
        if context.is_training and not driver.module.automatic_optimization:
            if driver.losses and not driver.is_done:
                what = "training_step calls manual_backward, and steps no optimizer with it: is it to accumulate gradients?"
                cure = "a step() in every call; global_batch_size is N times, and micro_batch_size once, what is now a batch"
                raise Unfit(f"task: {what} ({cure}, and the loss is not divided by N)")
            if driver.is_done:
                return sum(driver.losses[1:], driver.losses[0])
            return torch.zeros((), requires_grad=True)  # the optimizer is left out in this step
        if context.turn and not takes_number(driver.module):
            raise Unfit("task: several optimizers, but the module's automatic_optimization is true (it steps them itself)")
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if context.is_training and loss is None:
            raise Unfit("task: training_step returns no loss (a mean over its batch)")
        if loss is None and driver.losses:  # of a training_step that stands for a step which the module does not have
            return sum(driver.losses[1:], driver.losses[0])
        return loss if context.is_training else self._measured_loss(loss, _kind(context.split))

    def _training_loss(self, call: Any, batch: Any, context: Any) -> Any:
        """Return the loss of the training_step on a batch of an evaluation; of several optimizers, the sum of their losses."""
        driver = self.driver
        logged, metrics, is_padding = dict(driver.logged), dict(driver.metrics), driver.is_padding
        driver.is_padding = True  # its metrics are those of the training
        with unchanged(driver.module):
            loss = self._loss(self._drive(call, "training_step", batch, context), context)
        driver.logged, driver.metrics, driver.is_padding = logged, metrics, is_padding
        if loss is None:
            step = STEPS[_kind(context.split)]
            raise Unfit(
                f"task: {step} returns no loss and logs none, and neither does the training_step (a mean over its batch)"
            )
        return loss

    def _prepare(self) -> None:
        """Prepare for a training_step in mode=eval, which has no parts."""
        prepare(self.driver, configured_by(self._make, max_epochs=1, num_steps=1), self._make)

    def _measured_loss(self, returned: Any, split: str) -> Any:
        """Return the loss of an evaluation's step: what it logs as the loss, what it returns, or the only name with this word.

        None: it is not clear. Lightning looks at nothing that such a step returns, so it may be anything.
        """
        driver = self.driver
        values = {name: value for name, (value, _) in driver.logged.items()}
        values |= {name: metric._forward_cache for name, metric in driver.metrics.items()}
        named = [name for name, value in values.items() if "loss" in name and value is not None]
        if first := [name for name in ("loss", f"{split}_loss", "val_loss") if name in named]:
            return values[first[0]]
        if isinstance(returned, (int, float)) or (isinstance(returned, Tensor) and returned.numel() == 1):
            return returned
        return values[named[0]] if len(named) == 1 else None

    def measured(self, engine: Engine) -> dict[str, float]:
        """Call the hooks at the end of an evaluation; return what they log, and the values of metrics that were logged."""
        driver = self.driver
        driver.logged.clear()
        driver.is_padding = False
        for metric in metrics_of(driver.module):  # also where no loop has begun
            metric.process_group = engine.data_group
        self._show_means(engine)
        is_last = driver.split not in driver.validations[:-1]  # a validation has one end, after all of its sets
        for hook in hooks_of(driver.split, "epoch_end", "end") if is_last else ():
            driver.module.drive(driver, hook)
        found = numbers_of(driver.logged) | driver.values()
        if is_last:
            driver.is_evaluating = False
            driver.reset()
        return {name: value for name, value in found.items() if name != "loss"}  # which the row has

    def _show_means(self, engine: Engine) -> None:
        """Let the hooks at the end of an evaluation read the means of what its steps have logged. Collective."""
        if not any(has_own(self.driver.module, hook) for hook in _ENDS):
            return
        mine = {name: (float(total), weight) for name, (total, weight) in self.driver.totals.items()}
        of_ranks: list[Any] = [mine]
        if dist.is_initialized():  # a rank may have had no batch, and then no names
            of_ranks = [None] * dist.get_world_size(engine.data_group)
            dist.all_gather_object(of_ranks, mine, group=engine.data_group)
        means = dict[str, Tensor]()
        for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
            totals, weights = zip(*(of_rank[name] for of_rank in of_ranks if name in of_rank))
            means[name] = torch.tensor(sum(totals) / sum(weights))
        self.driver.trainer.callback_metrics = Validated({**self.driver.trainer.callback_metrics, **means})
        self.driver.totals.clear()


def _weighted(value: Any, count: int) -> tuple[Any, int]:
    mean = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return mean.reshape(()) * count, count


def _kind(split: str) -> str:
    """Return train, val or test: `val` also for a further validation set."""
    return split.partition(".")[0] or "train"


def _whole(batch: Any) -> Any:
    """Return a batch as the module's data have it."""
    if batch.targets is not None:
        return [batch.inputs, batch.targets]
    is_argument = isinstance(batch.inputs, tuple) and len(batch.inputs) == 1 and not isinstance(batch.inputs[0], Tensor)
    return batch.inputs[0] if is_argument else batch.inputs
