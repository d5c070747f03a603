"""The objects of a rehearsal: a model with its engine and optimizer, and the findings."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from framework.build.schedules import schedules
from framework.build.training import Builder
from framework.checkpoint.canonical import load_states, state_tensors
from framework.checkpoint.format import dtype_name
from framework.checkpoint.plain_state import NotSerializable, PlainState, plain_state_of, restore_plain
from framework.checkpoint.training_state import TrainingState
from framework.config.schema import Node
from framework.config.spelling import did_you_mean
from framework.data.source import Source
from framework.engine.engine import Engine
from framework.engine.seam import Step
from framework.engine.sums import Sums, means, with_loss_of_turn
from framework.modules.structure import freeze_parameters, in_eval_mode
from framework.modules.tensors import local
from framework.optim.optimizers import hidden_matrices, trainable
from framework.optim.turns import Turn
from framework.optim.update import Update
from framework.preflight.differences import plain_numbers, untouched
from framework.preflight.findings import Refused, blamed
from framework.runs.metrics_file import Row, is_curve
from framework.runtime.exits import Unfit
from framework.training.evaluation import totals
from framework.training.tracking import combined

SINGLE: Node = {"_target_": "framework.parallel.parallelize.parallelize"}
_TOTAL_STEPS = 100  # of the run, for schedules and parts
State = tuple[dict[str, Tensor], PlainState]  # the content of a checkpoint


@contextmanager
def _of_part(name: str) -> Iterator[None]:
    """Blame a part for its exceptions; a ValueError already says what is wrong with the part's arguments."""
    key = f"part.{name}"
    with blamed(key, "it fails in a rehearsal", "see docs/parts.md"):
        try:
            yield
        except ValueError as error:
            raise Unfit(f"{key}.{error}") from error


def _require_own_memory(tensors: Mapping[str, Tensor], *, key: str, cure: str) -> None:
    """Refuse two tensors in the same memory: after a restore or sharding, they would have separate memory."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        memory = local(tensor).data_ptr()  # 0: it has no memory
        first = names.setdefault(memory, name)
        if first != name and memory:
            raise Refused(key, f"{first} and {name} share their memory: a restore or a shard would separate them", cure)


def in_whole_batches(build: Builder, source: Source) -> Builder:
    """Return a rehearsal's builder that leaves out a short last batch, if there is a whole one: the run has its own sizes."""
    return build.altered(drop_last=len(source) >= build.config.global_batch_size)


class Player:
    """A model with its engine and optimizer, as a run would have them on one process."""

    def __init__(self, build: Builder) -> None:
        config, self._build, self.task, self._dataset = build.config, build, build.task, build.dataset
        with blamed("model", "it cannot be built", "does a plain script build it with these arguments? then please report it"):
            self.module = build.model()
        _require_own_memory(dict(self.module.named_parameters()), key="model", cure="assign the parameter, not its .data")
        self.module.train()
        freeze_parameters(self.module, config.trainer.freeze)
        hidden = hidden_matrices(self.module)
        with blamed("model", "it cannot be prepared for training", "see docs/extend.md, section A model"):
            self.engine: Engine = build.engine(self.module)
        trained = trainable(self.engine.module, hidden=hidden)
        with blamed("optimizer", "it cannot be built", "see the optimizer's own documentation"):
            self.update: Update = build.update(self.engine, trained, total_steps=_TOTAL_STEPS, epochs_before=lambda step: step)
        self._turns: Sequence[Turn | None] = self.update.turns or [None]
        self._computed: set[nn.Parameter] = set()  # by the latest backward pass: their gradients
        self._scratch = TemporaryDirectory(prefix="steadfast-")  # the parts may write here
        folder = Path(self._scratch.name)
        splits = build.splits(self.engine)  # a part may ask for a split; nothing is loaded yet
        self.parts = build.parts(
            self.engine, self.update, total_steps=_TOTAL_STEPS, splits=splits, directory=folder, blame=self._watched
        )

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Blame a part for its exceptions, and refuse it if it brings back a gradient that has been taken away."""
        removed = [parameter for parameter in self._computed if parameter.grad is None]
        with _of_part(name):
            yield
        if any(parameter.grad is not None for parameter in removed):
            what = "it brings back the gradient of a parameter that its turn or an earlier part does not train in this step"
            raise Refused(f"part.{name}", what, "leave gradients that are None; loop.recompute() does")

    def require_schedules(self, total_steps: int, *, epochs_before: Callable[[int], int]) -> None:
        """Refuse schedules that are no functions of the step, or that do not have a rate for each step of a run."""
        node, of = self._build.config.scheduler, self._build.config.optimizer
        one, other = (
            schedules(node, self.update.optimizer, of=of, total_steps=total_steps, epochs_before=epochs_before)
            for _ in range(2)
        )
        of_run = replace(self.update, schedule=one.pop(""), schedules=one)
        of_run.require_steps(total_steps)
        pairs = [(of_run.schedule, other.pop("")), *((one[name], other[name]) for name in one)]
        if any(mine.span(total_steps) != theirs.span(total_steps) for mine, theirs in pairs):
            what = "it has other rates each time: it draws random numbers, or depends on the time"
            raise Refused("scheduler", what, "a function of the step alone")

    def numbers(self) -> dict[tuple[str, str], str]:
        """Return the numbers in plain attributes of the run's objects, by key and path: they may explain a fault."""
        holders: dict[str, Any] = {"model": self.module, "task": self.task, "optimizer": self.update.optimizer}
        holders |= {f"metric.{name}": metric for name, metric in self._build.metrics.by_name.items()}
        holders |= {f"part.{name}": part for name, part in self.parts.by_name.items()}
        return plain_numbers(holders)

    def forward_backward(self, step: Step, *, index: int) -> Sums:
        """Run the step's first turn (without turns, all parameters). All turns run in each step, even if they are not due."""
        progress = self.parts.loop.progress
        progress.step, progress.samples_seen = index, index * step.num_samples
        self._step = self.parts.begin_step(step, has_row=True)
        self._sums = self._turn(self._turns[0], index=index)
        return self._sums

    def _turn(self, turn: Turn | None, *, index: int) -> Sums:
        for parameter in self.module.parameters():
            parameter.grad = None
        step = self._step._replace(turn=turn.name if turn is not None else "")
        sums = self.engine.train(step, index=index, loss_scale=1.0, measure=True)
        self._computed = {parameter for parameter in self.module.parameters() if parameter.grad is not None}
        self.update.keep(turn)
        return sums if turn is None else with_loss_of_turn(sums, turn.name)

    def take(self, index: int) -> None:
        sums = self._sums
        for number, turn in enumerate(self._turns):
            if number > 0:
                sums = self._turn(turn, index=index)
            self.parts.gradients_ready(sums, self._step._replace(turn=turn.name if turn is not None else ""))
            is_last = number == len(self._turns) - 1
            if is_last:
                self._gradients = [(p, p.grad.clone()) for p in self.engine.module.parameters() if p.grad is not None]
            self._update(turn, index=index, is_last=is_last)
        progress = self.parts.loop.progress
        progress.step, progress.samples_seen = index + 1, (index + 1) * self._step.num_samples
        self.parts.step_taken()
        self.parts.can_save(is_ending=False)
        with blamed("part", "its row fails", "see docs/parts.md"):
            columns = self.parts.columns()
            combined(*self._columns("train", sums, num_samples=self._step.num_samples), *columns)
        self.columns = {f"{name} ({key})": value for key, found in columns for name, value in found.items()}

    def _update(self, turn: Turn | None, *, index: int, is_last: bool = True) -> None:
        norm = self.engine.clip_grad_norm(turn.clip_grad_norm if turn is not None else None)
        self.update.take(index, grad_norm=norm, is_last=is_last)

    def take_more(self, count: int, *, first: int, within_s: float) -> int:
        """Take `count` more updates with the last gradients, from step `first`; fewer if they take long. Return their number.

        The parts are called too, and may act at some steps. Collective.
        """
        until, progress = time.monotonic() + within_s, self.parts.loop.progress
        self._computed = set()
        for index in range(first, first + count):
            progress.step, progress.samples_seen = index, index * self._step.num_samples
            self.parts.begin_step(self._step, has_row=False)
            for parameter, gradient in self._gradients:  # an update may reduce, scale or free them
                parameter.grad = gradient.clone()
            self.parts.gradients_ready(self._sums, self._step)
            self._update(self._turns[-1], index=index)
            progress.step += 1
            self.parts.step_taken()
            if time.monotonic() > until:
                return index + 1 - first
        return count

    def evaluate(self, step: Step, *, shares: Sequence[float]) -> Sums:
        """Evaluate a batch as a run evaluates a split; for each share, call the parts with a row of numbers times this share.

        Collective.
        """
        build = self._build
        self.parts.evaluating("val")
        with (
            blamed("model", "an evaluation fails", "does it run in a plain script? then please report it"),
            in_eval_mode(self.module),
        ):
            sums = self.engine.evaluate(step)
            training = [name or "the model" for name, part in self.module.named_modules() if part.training]
        if training:
            what = f"an evaluation puts {training[0]} into training mode and leaves it there"
            raise Refused("model", what, "leave modes to the loop")
        columns = self._columns("val", sums, num_samples=step.num_samples)
        with blamed("metric", "it fails on a batch of this dataset", "a metric that fits the task"):
            self.measured = build.metrics.compute(world=build.world)
            row = combined(*columns, ("metric", self.measured))
        self._require_monitors(row)
        for share in shares:
            scaled = {name: value * share if isinstance(value, float) else value for name, value in row.items()}
            self.parts.evaluated("val", scaled)
        return sums

    def _columns(self, split: str, sums: Sums, *, num_samples: int) -> list[tuple[str, Row]]:
        """Return the task's columns of a row. Collective."""
        found = means(totals(sums, world=self._build.world), num_samples=num_samples)
        with blamed("task", "its metrics fail on a batch of this dataset", "a task that fits the model"):
            columns = self._build.tracker().columns(split, found, step=self.parts.loop.step)
            combined(*columns)
        return columns

    def _require_monitors(self, row: Mapping[str, Any]) -> None:
        """Refuse a monitor that an evaluation does not measure: only the values show which columns metrics have."""
        config = self._build.config
        patience = config.trainer.early_stopping
        monitors = {"checkpoint.monitor": config.checkpoint.monitor}
        monitors |= {"trainer.early_stopping.monitor": patience.monitor} if patience.patience is not None else {}
        measured = [f"val/{name}" for name in row if is_curve(name)]
        for key, monitor in monitors.items():
            if monitor.startswith("val/") and monitor not in measured:
                close = did_you_mean(monitor, measured)
                choices = f"one of {', '.join(measured)}" + (f"; {close}" if close else "")
                raise Refused(key, f"{monitor} is not measured", choices)

    def state(self) -> State:
        """Return the content of a checkpoint. Refused if a checkpoint cannot hold all of it."""
        with blamed("part", "its state cannot be saved", "see docs/parts.md"):
            self.parts.saving()
            self.parts.plain()
        try:
            kept = plain_state_of(self.held(), initial=self.update.initial)
            tensors = state_tensors(self.held())
        except NotSerializable as error:
            raise Refused("optimizer", f"its state, or the model's extra state, holds {error}, which no checkpoint can hold",
                          "keep numbers, text and tensors, in lists or dictionaries") from None  # fmt: skip
        of_optimizer = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}
        _require_own_memory(of_optimizer, key="optimizer", cure="keep a tensor for each parameter")
        if odd := [name for name, tensor in tensors.items() if dtype_name(tensor.dtype) is None]:
            what = f"{odd[0].partition('/')[2]} is {tensors[odd[0]].dtype}, a type that no checkpoint supports"
            raise Refused("model", what, "precision=fp32, or a real tensor of two parts (torch.view_as_real)")
        return {name: tensor.clone() for name, tensor in tensors.items()}, copy.deepcopy(kept)

    def held(self) -> TrainingState:
        return TrainingState(self.module, self.update.optimizer, self.update.average, self.engine.task, self.parts)

    def untouched(self) -> AbstractContextManager[None]:
        """Return a context that restores parameters and buffers at its end."""
        return untouched(*(module for module in (self.module, self.engine.task) if module is not None))

    def restore(self, tensors: dict[str, Tensor], kept: PlainState) -> None:
        """Do in memory what `checkpoint.canonical.restore` does with a file."""
        mine, self._late = state_tensors(self.held()), dict[str, Tensor]()
        kinds = [{name: value.shape for name, value in held.items() if name.startswith("model/")} for held in (mine, tensors)]
        if odd := sorted(dict(kinds[0].items() ^ kinds[1].items())):
            what = f"{odd[0].partition('/')[2]} appears, or changes its shape, in training: no run could continue"
            raise Refused("model", what, "make it in the constructor, in its full size")
        with blamed("model", "its state cannot be restored", "the state dict of a new model has the same names"):
            for name, tensor in mine.items():
                if not name.startswith("part/"):
                    tensor.copy_(tensors[name])
        for name, tensor in ((name, tensor) for name, tensor in tensors.items() if name.startswith("part/")):
            if name in mine and mine[name].shape == tensor.shape:
                mine[name].copy_(tensor)
            else:
                self._late[name.removeprefix("part/")] = tensor.clone()
        with blamed("optimizer", "its state cannot be restored", "load_state_dict() accepts the result of state_dict()"):
            self._restore_optimizer(tensors, kept)

    def _restore_optimizer(self, tensors: dict[str, Tensor], kept: PlainState) -> None:
        optimizer = self.update.optimizer
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        states: dict[int, dict[str, Tensor]] = {}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            prefix = f"optimizer/{names[id(parameter)]}/"
            given = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            own = {name: _laid_out(value, like=parameter) for name, value in given.items()}
            if own:
                states[number] = own
        load_states(optimizer, states)
        restore_plain(kept, self.held(), late=self._late)


def _laid_out(value: Tensor, *, like: Tensor) -> Tensor:
    """Return a copy with the strides of a parameter of the same shape, as `restore` makes an optimizer's state."""
    return torch.empty_like(like.detach() if value.shape == like.shape else value, dtype=value.dtype).copy_(value)
