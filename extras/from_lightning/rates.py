"""The rates of the optimizers of a LightningModule that its own calls, or a metric, decide while it is trained."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from framework.runtime.exits import Unfit

PLACE = "configured_group"  # the option of a parameter group that tells which of the configured groups it is a part of
Options = list[dict[str, Any]]  # of each parameter group


class Configured(NamedTuple):
    """An optimizer of `configure_optimizers`, for a module without numbers."""

    optimizer: torch.optim.Optimizer
    names: list[list[str]]  # of the parameters of each group
    scheduler: Any  # or None
    interval: str  # epoch or step: when the scheduler steps
    frequency: int  # and after how many of these
    monitor: str | None  # the column that the scheduler follows; None: it follows none
    steps_itself: bool  # the module steps its scheduler or sets its rates, or batches of each epoch count

    @property
    def is_function_of_steps(self) -> bool:
        return self.scheduler is not None and self.monitor is None and not self.steps_itself


class Rates:
    """The configured optimizers with rates that are no function of the step. The run's optimizers follow their options.

    A rate is the run's scheduled rate times the share that is left of the configured one. A step starts from the options at
    `begin_step`, in each of the calls of a training_step; it takes the options that an optimizer has when it is stepped.
    """

    def __init__(self, configured: Sequence[Configured] = ()) -> None:
        self._all = configured
        self._moved = {n: one for n, one in enumerate(configured) if one.monitor is not None or one.steps_itself}
        self._first = {number: [group.get("initial_lr", group["lr"]) for group in one.optimizer.param_groups]
                       for number, one in self._moved.items()}  # fmt: skip
        self._calls = dict.fromkeys(self._moved, 0)  # of schedulers that follow a metric
        self._at_start, self._taken = dict[int, Options](), dict[int, Options]()
        self.waiting: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []  # steps that the module asks of its schedulers
        self.base = 1.0  # the share of the first rate, at the start of a step

    @property
    def moves(self) -> bool:
        """Whether there is such an optimizer."""
        return bool(self._moved)

    @property
    def scheduled(self) -> list[int]:
        """The numbers of the optimizers that have a scheduler."""
        return [number for number, one in enumerate(self._all) if one.scheduler is not None]

    def groups(self, number: int) -> list[dict[str, Any]]:
        """Return an optimizer's parameter groups, for a module to read and to set."""
        if number not in self._moved:
            what = "the rates of its optimizer are set by its scheduler: a training row has the column lr"
            raise Unfit(f"task: {what} (set in optimizer_step, or with automatic_optimization = False)")
        return self._moved[number].optimizer.param_groups

    def scheduler(self, number: int) -> Any:
        if number not in self._moved:
            what = "lr_schedulers() is for automatic_optimization = False"
            raise Unfit(f"task: {what} (configure_optimizers says with `interval` when they step)")
        return self._moved[number].scheduler

    def begin_step(self) -> None:
        """Start a step of the optimizers."""
        self._at_start = {number: _options(one) for number, one in self._moved.items()}
        self._taken = {**self._at_start}
        shares = (self._share(number, 0, options) for number, options in self._at_start.items())
        self.base = next(shares, 1.0) or 1.0

    def restart(self) -> None:
        """Start the step again, for another of its micro-batches or optimizers."""
        for number, options in self._at_start.items():
            _set(self._moved[number], options)
        self.waiting.clear()

    def take(self, number: int) -> None:
        """Let the step of an optimizer take its options as they are now."""
        if number in self._moved:
            self._taken[number] = _options(self._moved[number])

    def follow(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Give the run's optimizers the options for their step, after the run has set the scheduled rates, times `base`."""
        for number, options in self._taken.items():
            for group in optimizers[number].param_groups:
                if (place := group.get(PLACE)) is not None:  # otherwise the user has chosen another optimizer
                    group.update({name: value for name, value in options[place].items() if name not in ("lr", "initial_lr")})
                    group["lr"] *= self._share(number, place, options) / self.base

    def _share(self, number: int, place: int, options: Options) -> float:
        first = self._first[number][place]
        return options[place]["lr"] / first if first else 1.0

    def flush(self) -> None:
        """Take the steps that the module has asked of its schedulers."""
        for number, given, named in self.waiting:
            self._step(self._moved[number], lambda scheduler: scheduler.step(*given, **named))  # noqa: B023
        self.waiting.clear()

    def ended(self, interval: str, index: int, *, step: Callable[[Any, Any], None]) -> None:
        """Let schedulers step at the end of a step or an epoch, counted from 0. For automatic optimization."""
        for one in self._moved.values():
            is_due = one.interval == interval and (index + 1) % one.frequency == 0
            if is_due and one.scheduler is not None and one.monitor is None:
                self._step(one, lambda scheduler: step(scheduler, None))

    def evaluated(self, row: Mapping[str, Any], *, step: Callable[[Any, Any], None]) -> None:
        """Let the schedulers step that follow a column of this validation. For automatic optimization."""
        for number, one in self._moved.items():
            if one.monitor is None:
                continue
            name = one.monitor.removeprefix("val/")
            if name not in row:
                raise Unfit(f"task: a scheduler follows {one.monitor!r}, which is not measured (one of {', '.join(row)})")
            self._calls[number] += 1
            if self._calls[number] % one.frequency == 0:
                self._step(one, lambda scheduler: step(scheduler, row[name]))  # noqa: B023

    def _step(self, one: Configured, step: Callable[[Any], None]) -> None:
        one.optimizer.step()  # it has no gradients; torch warns if the scheduler steps first
        step(one.scheduler)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, one in self._moved.items():
            found |= {f"{number}.options": _options(one), f"{number}.calls": self._calls[number]}
            found |= {f"{number}.scheduler": one.scheduler.state_dict()} if one.scheduler is not None else {}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for number, one in self._moved.items():
            if f"{number}.options" in state:
                _set(one, state[f"{number}.options"])
                self._calls[number] = state[f"{number}.calls"]
                if one.scheduler is not None:
                    one.scheduler.load_state_dict(state[f"{number}.scheduler"])


def _options(one: Configured) -> Options:
    return [{name: value for name, value in group.items() if name != "params"} for group in one.optimizer.param_groups]


def _set(one: Configured, options: Options) -> None:
    for group, values in zip(one.optimizer.param_groups, options):
        group.update(values)
