"""Learning-rate schedules: pure functions of the step, so a checkpoint stores nothing. They return the share of `lr`."""

import inspect
import math
from collections.abc import Callable
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


def tabulated(make: Callable[[torch.optim.Optimizer], Any], *, lr: float) -> Callable[[int], float]:
    """Return the shares of `lr` that a torch scheduler gives, as a pure function of the step.

    `make` builds the scheduler for an optimizer with the peak `lr`. Its other effects (for example on momentum) are not used.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer)
    if any(one.default is one.empty for one in inspect.signature(scheduler.step).parameters.values()):
        raise ValueError(f"{type(scheduler).__name__} uses a metric, but a schedule must be a function of the step alone")
    rates = [float(optimizer.param_groups[0]["lr"])]

    def share(step: int) -> float:
        while len(rates) <= step:
            optimizer.step()  # torch warns if the scheduler steps before the optimizer
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates[step] / lr

    return share
