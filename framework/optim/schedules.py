"""Learning-rate schedules: pure functions of the step, so a checkpoint stores nothing. They return the share of `lr`."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le, Lt

Steps = Annotated[int, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]


def _warm_up(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def constant(step: int, total_steps: int, *, warmup_steps: Steps) -> float:
    """Return the share with linear warm-up, then constant. In every schedule, `step` counts from 0 to `total_steps` - 1."""
    return _warm_up(step, warmup_steps)


def range_test(step: int, total_steps: int, *, start_ratio: Annotated[float, Gt(0), Lt(1)]) -> float:
    """Return an exponential from `start_ratio` in the first step to 1 in the last (learning-rate range test, Smith 2017)."""
    return float(start_ratio ** (1 - step / max(1, total_steps - 1)))


def cosine(step: int, total_steps: int, *, warmup_steps: Steps, min_lr_ratio: Share) -> float:
    """Return linear warm-up, then half a cosine from 1 to `min_lr_ratio` (Loshchilov & Hutter 2017, without restarts)."""
    if step < warmup_steps:
        return _warm_up(step, warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def step(step: int, total_steps: int, *, warmup_steps: Steps, milestones: list[Steps], gamma: Share) -> float:
    """Return linear warm-up, then a constant that is multiplied by `gamma` at each milestone."""
    return _warm_up(step, warmup_steps) * gamma ** sum(step >= milestone for milestone in milestones)


def wsd(step: int, total_steps: int, *, warmup_steps: Steps, decay_steps: Steps, min_lr_ratio: Share) -> float:
    """Return warm-up, stable, decay: linear up, flat, linear down to `min_lr_ratio` over the last `decay_steps`.

    Source: Hu et al. 2024, "MiniCPM".
    """
    remaining = total_steps - step
    down = min_lr_ratio + (1 - min_lr_ratio) * min(1.0, remaining / decay_steps) if decay_steps else 1.0
    return min(_warm_up(step, warmup_steps), down)


# --- schedulers of torch, and of any library that writes such


@dataclass(frozen=True)
class Schedule:
    """The share of the peak learning rate in a step, counted from 0.

    `options` returns what it sets besides in a parameter group, by the step and the group's number: a momentum, a rate of the
    group's own.
    """

    share: Callable[[int], float]
    options: Callable[[int, int], Mapping[str, Any]] = lambda step, number: {}

    def __call__(self, step: int) -> float:
        return self.share(step)

    def span(self, total_steps: int) -> tuple[float, float, float]:
        """Return the smallest and the largest share of so many steps, and the last. It fails if the schedule fails in them."""
        steps = {0, total_steps - 1, *range(0, total_steps, max(1, total_steps // 1000))}
        shares = [self.share(step) for step in sorted(steps)]
        return min(shares), max(shares), shares[-1]


def tabulated(
    make: Callable[[torch.optim.Optimizer], Any], *, lr: float, groups: Sequence[Mapping[str, Any]],
    calls_before: Callable[[int], int],
) -> Schedule:  # fmt: skip
    """Return a scheduler of torch as a pure function of the step.

    `make` builds the scheduler for an optimizer with parameter groups of these options, of which one may have the peak `lr`;
    `calls_before` returns how often `scheduler.step()` is called before a step, counted from 0. ValueError if the scheduler
    needs a metric, or if lr is 0.
    """
    kept = [{name: value for name, value in group.items() if name not in ("params", "initial_lr")} for group in groups]
    shown = next((number for number, group in enumerate(kept) if group["lr"] == lr), 0)  # the group whose rate is the run's
    if not kept[shown]["lr"] > 0:
        raise ValueError(f"optimizer.lr: {lr:g}, but a scheduler of torch multiplies it (a number above 0)")
    optimizer = _WithOptions(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], **copy.deepcopy(group)} for group in kept], copy.deepcopy(kept[0])
    )
    scheduler = make(optimizer)
    if any(one.default is one.empty for one in inspect.signature(scheduler.step).parameters.values()):
        raise ValueError(f"{type(scheduler).__name__} uses a metric, but a schedule must be a function of the step alone "
                         "(scheduler=cosine, step or wsd; trainer.early_stopping follows a metric)")  # fmt: skip
    table: list[list[dict[str, Any]]] = []  # by call and group
    moved: set[str] = {"lr"}

    def at(step: int) -> list[dict[str, Any]]:
        number = calls_before(step)
        while len(table) <= number:
            if table:
                optimizer.step()  # torch warns if the scheduler steps before the optimizer
                scheduler.step()
            now = optimizer.param_groups
            moved.update(name for group, own in zip(now, kept) for name, value in own.items() if group[name] != value)
            table.append([{name: float(group[name]) if name == "lr" else group[name] for name in moved} for group in now])
        return table[number]

    return Schedule(lambda step: at(step)[shown]["lr"] / kept[shown]["lr"], lambda step, number: at(step)[number])


class _WithOptions(torch.optim.Optimizer):
    """An optimizer of one parameter with the options of another optimizer, which a scheduler may change."""

    def step(self, closure: Any = None) -> Any:
        return None
