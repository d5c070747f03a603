"""The hooks of a LightningModule as a part of the loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from extras.from_lightning.callbacks import remark
from extras.from_lightning.driver import Driver, Validated, optimizers_of
from extras.from_lightning.frozen import same_trained
from extras.from_lightning.kept import lists_of, plain_attributes, unchanged
from extras.from_lightning.logger import Logger
from extras.from_lightning.module import has_own
from extras.from_lightning.optimizers import configured_by, names_of_turns, order_of_steps
from extras.from_lightning.rates import Configured, Rates
from framework.modules.tensors import gradient_of, local
from framework.randomness import key, seed_generators
from framework.runtime.exits import Unfit
from framework.runtime.log import LOGGER
from framework.training.loop_view import Loop


class Hooks:
    """The hooks of a LightningModule as a part of the loop, and the state of metrics that live longer than an evaluation."""

    def __init__(self, driver: Driver, module: Callable[[], Any]) -> None:
        self.driver, self._make = driver, module
        self._columns: dict[str, float] = {}  # that hooks have logged in this step
        self._metrics: dict[str, Metric] = {}
        self._validated: dict[str, Any] = {}  # the columns of the last validation
        self._initial: dict[str, Any] = {}  # plain attributes of the module
        self._lists: dict[str, list[Any]] = {}  # and lists
        self._lr_share = 1.0
        self._has_begun = False

    def begun(self, loop: Loop) -> None:
        order, trainer = loop.splits.loader("train").order, self.driver.trainer
        self.steps_per_epoch = trainer.num_training_batches = -(-order.epoch_size // order.global_batch_size)
        trainer.num_steps = trainer.max_steps = loop.total_steps
        trainer.max_epochs = -(-loop.total_steps // self.steps_per_epoch)
        configured = configured_by(self._make, max_epochs=trainer.max_epochs, num_steps=loop.total_steps)
        prepare(self.driver, configured, self._make)
        self.driver.validations = loop.splits.validations()
        optimizers: dict[str, Any] = getattr(loop.optimizer, "optimizers", {"": loop.optimizer})
        followed = [optimizers[turn] for turn in self.driver.turns if turn in optimizers]
        loop.optimizer.register_step_pre_hook(lambda *_: self.driver.rates.follow(followed))
        self._metrics = {name: part for name, part in loop.module.named_modules() if isinstance(part, Metric)}
        for metric in self._metrics.values():
            metric.process_group = loop.engine.data_group
        trainer.logger, trainer.default_root_dir = Logger(loop), str(loop.directory)
        if (made := getattr(loop.dataset, "made", None)) is not None:
            trainer.datamodule = made
        self._loop, self._initial, self._lists = loop, plain_attributes(loop.module), lists_of(loop.module)
        if loop.is_main and (said := remark(loop.module)):
            LOGGER.warning("task: %s", said)
        self._call(loop, "on_fit_start", "on_train_start")

    def step_begun(self, loop: Loop) -> None:
        self.driver.reset()
        self._columns.clear()
        self.driver.earlier.clear()
        self.driver.num_calls = self.driver.num_skipped = 0
        number, epoch = loop.step % self.steps_per_epoch, loop.step // self.steps_per_epoch
        if number == 0 or not self._has_begun:
            seed_generators(key(loop.seed, "on_train_epoch_start", epoch), devices=[loop.device])
            with unchanged(loop.module, as_saved=True) if number else nullcontext():  # the run continues within the epoch
                self._call(loop, "on_train_epoch_start", epoch=epoch)
        self._has_begun = True
        seed_generators(key(loop.seed, "on_train_batch_start", loop.step), devices=[loop.device])
        if self._call(loop, "on_train_batch_start", given=(None, number), epoch=epoch) == -1:
            raise Unfit("task: on_train_batch_start returns -1 (loop.stop() of a part; trainer.early_stopping)")
        self.driver.rates.begin_step()
        if self.driver.rates.moves:
            if loop.lr_share != self._lr_share:
                raise Unfit("task: the module sets its rates, and a part sets loop.lr_share too (one of them)")
            loop.lr_share = self._lr_share = self.driver.rates.base

    def gradients_ready(self, loop: Loop) -> None:
        driver, module = self.driver, loop.module
        number, epoch = driver.turns.index(loop.turn), loop.step // self.steps_per_epoch
        if number != driver.order[-1]:  # the last turn runs the whole training_step
            driver.reset()
        driver.earlier |= driver.logged.keys()
        driver.logged.clear()
        self._call(loop, "on_before_zero_grad", given=(loop.optimizer,), epoch=epoch)
        if not driver.num_skipped:
            self._call(loop, "on_after_backward", epoch=epoch)
        for parameter in loop.trained().values() if driver.num_skipped else ():
            parameter.grad = None
        self._call(loop, "on_before_optimizer_step", given=(loop.optimizer,), epoch=epoch)
        if module.automatic_optimization:
            optimizer, driver.clip, driver.has_stepped = driver.trainer.optimizers[number], None, False
            if has_own(module, "configure_gradient_clipping"):
                self._call(loop, "configure_gradient_clipping", given=(optimizer, None, None), epoch=epoch)
        if driver.clip is not None:
            _clip(loop, *driver.clip)
        if module.automatic_optimization and has_own(module, "optimizer_step"):
            given = epoch, loop.step % self.steps_per_epoch, optimizer, lambda: None
            self._call(loop, "optimizer_step", given=given, epoch=epoch)
            for parameter in loop.trained().values() if not driver.has_stepped else ():
                parameter.grad = None
        self._columns |= numbers_of(driver.logged)

    def step_taken(self, loop: Loop) -> None:
        number, trainer, rates = (loop.step - 1) % self.steps_per_epoch, self.driver.trainer, self.driver.rates
        self.driver.logged.clear()
        is_automatic = loop.module.automatic_optimization
        if is_automatic:
            rates.ended("step", number, step=self._step_scheduler)
        self._call(loop, "on_train_batch_end", given=(None, None, number))
        if number == self.steps_per_epoch - 1 and self.driver.num_calls:  # a rehearsal takes steps without a training_step
            self._call(loop, "on_train_epoch_end")
            if is_automatic:
                rates.ended("epoch", trainer.current_epoch, step=self._step_scheduler)
        rates.flush()
        self._columns |= numbers_of(self.driver.logged)
        if trainer.should_stop:
            loop.stop("the module has set trainer.should_stop")

    def _step_scheduler(self, scheduler: Any, metric: float | None) -> None:
        if has_own(self._loop.module, "lr_scheduler_step"):
            self._call(self._loop, "lr_scheduler_step", given=(scheduler, metric))
        else:
            scheduler.step(*(() if metric is None else (metric,)))

    def sum_over_ranks(self, flag: bool) -> float:
        """Return on how many ranks a flag is true. Collective."""
        return float(self._loop.sum(torch.tensor(float(flag))))

    def row(self, loop: Loop) -> dict[str, float]:
        found = self._columns | self.driver.values()
        self.driver.reset()
        return {name: value for name, value in found.items() if name != "loss"}  # which the row has

    def evaluating(self, loop: Loop, split: str) -> None:
        if split in ("val", "test"):  # not a further set of the same validation
            self.driver.reset()
            self.driver.is_evaluating = True
            self._call(loop, *hooks_of(split, "start", "epoch_start"))

    def evaluated(self, loop: Loop, split: str, row: Mapping[str, Any]) -> None:
        if split == "test":
            return
        suffix = f"/dataloader_idx_{self.driver.loader_number}"  # as Lightning names them
        of_set = {f"{name}{suffix}": value for name, value in row.items()}
        self._validated = {**row, **of_set, **(self._validated if split != "val" else {})}
        if split == self.driver.validations[-1]:
            numbers = {name: value for name, value in self._validated.items() if isinstance(value, (int, float))}
            self._show(loop.gather(numbers)[0])
            if loop.module.automatic_optimization:
                self.driver.rates.evaluated(self._validated, step=self._step_scheduler)
            self.driver.rates.flush()

    def _show(self, validated: Mapping[str, float]) -> None:
        """Let the module read the columns of the last validation."""
        named = {**validated, **{f"val/{name}": value for name, value in validated.items()}}
        self.driver.trainer.callback_metrics = Validated((name, torch.tensor(value)) for name, value in named.items())

    def saving(self, loop: Loop) -> None:
        self.driver.reset()

    def ended(self, loop: Loop) -> None:
        self._call(loop, "on_train_end", "on_fit_end")

    def state_dict(self) -> dict[str, Any]:
        """Return what the module keeps outside of its state: metrics that it resets itself, and plain attributes that changed.

        A metric has one state for all ranks, which the first of them goes on with.
        """
        found: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            if not (count := int(self._loop.sum(torch.tensor(float(metric._update_count))))):
                continue
            found[f"metric.{name}._update_count"] = count
            for state, value in _synchronised(metric).items():
                found[f"metric.{name}.{state}"] = value
        for name, value in plain_attributes(self._loop.module).items():
            if value != self._initial.get(name, value if name in self._initial else None):
                found[f"attribute.{name}"] = value
        found |= {f"list.{name}": value for name, value in self._changed_lists()}
        if has_own(self._loop.module, "on_save_checkpoint"):
            checkpoint = self._checkpoint()
            known = {*checkpoint}
            self._call(self._loop, "on_save_checkpoint", given=(checkpoint,))
            found |= {f"checkpoint.{name}": value for name, value in checkpoint.items() if name not in known}
        found |= {f"validated.{name}": float(v) for name, v in self.driver.trainer.callback_metrics.items() if "/" not in name}
        return found | {f"rates.{name}": value for name, value in self.driver.rates.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        of_rates, validated, checkpoint = dict[str, Any](), dict[str, float](), self._checkpoint()
        for path, value in state.items():
            kind, _, name = path.partition(".")
            if kind == "rates":
                of_rates[name] = value
            elif kind == "list":
                setattr(self._loop.module, name, [*value.values()] if isinstance(value, dict) else value)
            elif kind == "validated":
                validated[name] = value
            elif kind == "checkpoint":
                checkpoint[name] = value
            elif kind == "attribute":
                setattr(self._loop.module, name, value)
            elif not dist.is_initialized() or dist.get_rank() == 0:
                metric, _, attribute = name.rpartition(".")
                is_list = isinstance(self._metrics[metric]._defaults.get(attribute), list)
                setattr(self._metrics[metric], attribute, [value] if is_list else value)
        self.driver.rates.load_state_dict(of_rates)
        self._show(validated)
        if has_own(self._loop.module, "on_load_checkpoint"):
            self._call(self._loop, "on_load_checkpoint", given=(checkpoint,))

    def _changed_lists(self) -> Iterator[tuple[str, Any]]:
        """Yield the lists that have changed, as a checkpoint holds them. Unfit for one that on_train_epoch_end may read."""
        is_read, several = has_own(self._loop.module, "on_train_epoch_end"), dist.is_initialized() and dist.get_world_size() > 1
        for name, items in lists_of(self._loop.module).items():
            if [*map(id, items)] == [*map(id, self._lists.get(name, ()))]:
                continue
            are_tensors = all(isinstance(item, Tensor) for item in items)
            if not several and (are_tensors or all(type(item) in (bool, int, float, str) for item in items)):
                yield name, {str(n): item.detach() for n, item in enumerate(items)} if are_tensors and items else items
            elif is_read:
                why = "each process has its own" if several else "no checkpoint holds it"
                raise Unfit(f"task: the module's list {name} changes, and {why} (a metric of torchmetrics, such as MeanMetric)")

    def _checkpoint(self) -> dict[str, Any]:
        """Return what a module finds in a checkpoint of Lightning; this framework saves the weights itself."""
        trainer = self.driver.trainer
        return {
            "state_dict": self._loop.module.state_dict(),
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
        }

    def _call(self, loop: Loop, *hooks: str, given: tuple[Any, ...] = (), epoch: int | None = None) -> Any:
        """Call hooks of the module. `epoch`: None is that of the last step. Return what the last hook returns."""
        module: Any = loop.module
        trainer = self.driver.trainer
        trainer.global_step = loop.step * len(self.driver.turns)
        trainer.current_epoch = max(0, loop.step - 1) // self.steps_per_epoch if epoch is None else epoch
        self.driver.is_padding = False
        returned = None
        for hook in hooks:
            with same_trained(module, hook) if has_own(module, hook) else nullcontext():
                returned = module.drive(self.driver, hook, *given)
        return returned


def prepare(driver: Driver, configured: Sequence[Configured], make: Callable[[], Any]) -> None:
    """Give a module's methods its optimizers and schedulers."""
    driver.rates = Rates(configured)
    driver.turns = names_of_turns(configured) if len(configured) > 1 else [""]
    driver.order = order_of_steps(make, len(configured))
    driver.trainer.optimizers = optimizers_of(driver)


def hooks_of(split: str, *moments: str) -> list[str]:
    """Return the names of the hooks at moments of an evaluation."""
    return [f"on_{'test' if split == 'test' else 'validation'}_{moment}" for moment in moments]


def numbers_of(logged: Mapping[str, tuple[Any, int | None]]) -> dict[str, float]:
    """Return what hooks have logged."""
    plain = {name: value.detach() if isinstance(value, Tensor) else value for name, (value, _) in logged.items()}
    return {name: float(value) for name, value in plain.items()}


def _clip(loop: Loop, value: float, kind: str) -> None:
    """Clip the gradients that are ready by their global norm, or each of their numbers."""
    if kind == "norm":
        loop.engine.clip_grad_norm(value)
        return
    for parameter in loop.trained().values():
        if (gradient := gradient_of(parameter)) is not None:
            local(gradient).clamp_(-value, value)


def _synchronised(metric: Metric) -> dict[str, Any]:
    """Return a metric's state over all ranks: tensors, those of a list joined. Collective."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several:
        metric.sync(process_group=metric.process_group)
    joined: dict[str, Any] = {}
    for name, value in metric.metric_state.items():
        if not isinstance(value, list):
            joined[name] = value.clone()
        elif value:
            joined[name] = torch.cat([item.reshape(1) if item.ndim == 0 else item for item in value])
    if several:
        metric.unsync()
    return joined
