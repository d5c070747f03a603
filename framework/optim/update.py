"""One update of the parameters: everything between a step's gradients and the next parameters."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from framework.modules.tensors import by_mesh, gradient_of, local
from framework.optim.optimizers import Trainable
from framework.optim.precision import LossScale
from framework.optim.schedules import Schedule
from framework.optim.turns import InTurns, Turn, groups_of
from framework.randomness import key, seed_generators
from framework.runtime.exits import Unfit, error_text
from framework.runtime.torch_internals import move_all_towards

ChangeGradients = Callable[[int], None]  # changes this rank's gradients in a step, counted from 0. Collective


@dataclass(eq=False)
class ClipValues:
    """A change that clips every element of the gradient to [-max_value, max_value]."""

    trained: list[Trainable]
    _: KW_ONLY
    max_value: float

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        for item in self.trained:
            if (gradient := gradient_of(item.parameter)) is not None:
                mine = local(gradient)
                # an infinite element means divergence, and a clamp would hide it
                mine.masked_fill_(mine.isinf(), torch.nan).clamp_(-self.max_value, self.max_value)


def gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, cut like the parameter; if it has none, set it to zeros."""
    gradient = gradient_of(parameter)
    if gradient is None:
        gradient = parameter.grad = torch.zeros_like(parameter)
    return gradient


class AveragedWeights:
    """A moving average of the trained parameters, on this rank's shards: without a gather and without a copy of the model.

    After a step, counted from 0, it moves towards the weights by the `share` of that step. A constant share makes it
    exponential.
    """

    def __init__(self, trained: list[Trainable], *, share: Callable[[int], float]) -> None:
        self.share = share
        self._parameters: list[Tensor] = [item.parameter for item in trained]
        self.tensors = {item.name: item.parameter.detach().clone() for item in trained}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights, after an optimizer step."""
        if share := self.share(step):
            for averages, parameters in zip(by_mesh(self.tensors.values()), by_mesh(self._parameters)):
                move_all_towards(averages, parameters, share=share)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and the average. Call it before an evaluation, and again after it."""
        for parameter, average in zip(self._parameters, self.tensors.values()):
            current = parameter.clone()
            parameter.copy_(average)
            average.copy_(current)


class OwnAverage:
    """The average that an optimizer keeps itself; its eval() replaces the weights by the average (schedule-free learning)."""

    def __init__(self, optimizer: Any, trained: list[Trainable]) -> None:
        self._optimizer = optimizer
        self._trained = trained
        self._held: tuple[list[Tensor], list[dict[str, Any]]] | None = None  # the weights, while the average replaces them
        optimizer.train()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Copies of the average, by name."""
        self.swap()
        copies = {item.name: item.parameter.detach().clone() for item in self._trained}
        self.swap()
        return copies

    def update(self, step: int) -> None:
        """Do nothing: the optimizer's step has already updated the average."""

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and the average. Copies restore the weights, because train() would round them."""
        if self._held is None:
            self._held = [item.parameter.detach().clone() for item in self._trained], group_values(self._optimizer)
            self._optimizer.eval()
            return
        (weights, values), self._held = self._held, None
        for item, weight in zip(self._trained, weights):
            item.parameter.copy_(weight)
        for group, own in zip(self._optimizer.param_groups, values):
            group.update(own)


Average = AveragedWeights | OwnAverage


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return copies of the values of each parameter group, except its parameters and its learning rate (a run sets it)."""
    kept = [{key: value for key, value in group.items() if key not in ("params", "lr")} for group in optimizer.param_groups]
    return copy.deepcopy(kept)


def averages_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer keeps an average of the weights, and needs to know when an evaluation starts and ends."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@dataclass(eq=False)
class Update:
    """The optimizer with its learning rate, the loss scale, the changes of the gradients, and the average of the weights.

    `schedule` returns the share of `peak_lr` for a step, counted from 0. A rank's parameter groups may have other peaks.
    """

    optimizer: torch.optim.Optimizer
    _: KW_ONLY
    seed: int
    peak_lr: float
    schedule: Schedule
    loss_scale: LossScale
    changes: Sequence[ChangeGradients]  # in this order, after the norm is clipped
    average: Average | None
    turns: Sequence[Turn] = ()  # of a step; empty: a step moves all parameters at once
    schedules: Mapping[str, Schedule] = field(default_factory=dict)  # of the turns
    trained: Sequence[Trainable] = ()
    lr_share: float = 1.0  # of the scheduled rates: a part of the loop may lower them

    def __post_init__(self) -> None:
        self.initial = group_values(self.optimizer)  # an optimizer's later changes of these are part of its state
        of_schedules = groups_of(self.optimizer, self.schedules)
        places = {id(group): (self.schedules.get(name, self.schedule), number)
                  for name, groups in of_schedules.items() for number, group in enumerate(groups)}  # fmt: skip
        self._places = [(group["lr"], *places[id(group)]) for group in self.optimizer.param_groups]
        self._reported = self._places[0][:2] if self.turns else (self.peak_lr, self.schedule)
        self._devices = {parameter.device for group in self.optimizer.param_groups for parameter in group["params"]}

    def lr(self, step: int) -> float:
        """Return the learning rate of a step; with turns, of the first turn."""
        return self._reported[0] * self._reported[1](step) * self.lr_share

    def lr_span(self, total_steps: int) -> list[float]:
        """Return the lowest, the highest and the last learning rate of so many steps."""
        return [self._reported[0] * share for share in self._reported[1].span(total_steps)]

    def _options(self, step: int) -> list[dict[str, Any]]:
        """Return what the schedules set in each of the optimizer's parameter groups."""
        found = [{"lr": peak * schedule(step), **schedule.options(step, number)} for peak, schedule, number in self._places]
        return found if self.lr_share == 1.0 else [options | {"lr": options["lr"] * self.lr_share} for options in found]

    def require_steps(self, total_steps: int) -> None:
        """Unfit unless the schedules have a rate for each of so many steps."""
        for name, schedule in {"scheduler": self.schedule, **self.schedules}.items():
            try:
                schedule.span(total_steps)
            except Exception as error:
                what = f"it fails within the {total_steps} steps of this run: {error_text(error)}"
                raise Unfit(f"{name}: {what} (arguments for this number of steps)") from error

    def due(self, step: int) -> Sequence[Turn | None]:
        """Return the turns of a step, counted from 0; None means all parameters at once."""
        return [turn for turn in self.turns if turn.is_due(step)] or [None]

    def keep(self, turn: Turn) -> None:
        """Keep only the gradients of a turn's parameters, and select the turn's optimizer for the step."""
        assert isinstance(self.optimizer, InTurns)
        self.optimizer.turn = turn.name
        for item in self.trained:
            if not turn.has(item.name):
                item.parameter.grad = None

    def take(self, step: int, *, grad_norm: Tensor | None, is_last: bool = True) -> None:
        """Move the parameters with the gradients, or skip the step if fp16 gradients have overflowed.

        `grad_norm` is global, shape (); only fp16 needs it. The average is updated after the last turn of a step. Diverged if
        the loss scale cannot be lowered further.
        """
        if not self.loss_scale.accepts(grad_norm):
            return
        for group, options in zip(self.optimizer.param_groups, self._options(step)):
            group.update(options)
        for change in self.changes:
            change(step)
        seed_generators(key(self.seed, "optimizer", step), devices=self._devices)
        self.optimizer.step()
        if self.average is not None and is_last:
            self.average.update(step)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the weights by the average, if there is one, within the context."""
        if self.average is not None:
            self.average.swap()
        try:
            yield
        finally:
            if self.average is not None:
                self.average.swap()
