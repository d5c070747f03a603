"""The schedules that a configuration names: functions of the step, and schedulers of torch, which take an optimizer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from framework.config.period import epochs_of, samples_of
from framework.config.schema import Node
from framework.config.targets import TOTALS, component, locate, signature_of
from framework.data.order import Order
from framework.optim.schedules import Schedule, tabulated
from framework.optim.turns import groups_of, turns_of

EACH_STEP = Order(num_samples=1, global_batch_size=1, seed=0, drop_last=False, sample_tokens=1)  # if no data are known


def peak_lr(node: Node, optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate that the run's schedule multiplies; `node` is the optimizer's."""
    first = optimizer.param_groups[0]["lr"]
    return float(first if node.get("turns") else node.get("lr", first))


def schedules(node: Node, optimizer: torch.optim.Optimizer, *, of: Node, total_steps: int, order: Order) -> dict[str, Schedule]:
    """Return the schedule of a node under the name "", and those of the turns, in the optimizer's node `of`, with their own."""
    make, lr = partial(schedule, total_steps=total_steps, order=order), peak_lr(of, optimizer)
    own = {turn.name: turn for turn in turns_of(of) if turn.scheduler is not None}
    groups = groups_of(optimizer, own)
    found = {"": make(node, lr=lr, groups=groups[""] or optimizer.param_groups)}
    for name, turn in own.items():
        assert turn.scheduler is not None
        found[name] = make(turn.scheduler, lr=turn.optimizer.get("lr", lr), groups=groups[name])
    return found


def schedule(node: Node, *, total_steps: int, lr: float, groups: Sequence[Mapping[str, Any]], order: Order) -> Schedule:
    """Return the schedule that a node names: of this project, or a scheduler of torch, which takes an optimizer.

    `groups` are the optimizer's parameter groups, `order` that of the training samples.
    """
    every = node.get("every")
    if every not in (None, "epoch", "step"):
        raise ValueError(f"scheduler.every: {every!r} is not valid (epoch or step)")
    if not _takes_optimizer(node):
        if every is not None:
            raise ValueError("scheduler.every: this schedule is a function of the step (without it)")
        share = component({name: _in_steps(value, order) for name, value in node.items()})
        return Schedule(lambda step: share(step, total_steps))
    totals = TOTALS & signature_of(node["_target_"]).arguments.keys()
    if every is None and not totals:  # a scheduler that takes the number of steps counts steps
        raise ValueError("scheduler.every: is missing (epoch or step: when a script calls scheduler.step())")
    calls_before: Callable[[int], int] = order.epochs_before if every == "epoch" else lambda step: step
    if "epochs" not in node and all(node.get(name) is None for name in totals):
        node = node | dict.fromkeys(totals, calls_before(total_steps - 1) + 1)
    node = {name: value for name, value in node.items() if name != "every"}
    return tabulated(partial(_scheduler, node), lr=lr, groups=groups, calls_before=calls_before)


def _in_steps(value: Any, order: Order) -> Any:
    """Return the number of steps for a text such as `1ep`, `5000samples` or `1000000tokens`; any other value as it is."""
    epochs, samples = epochs_of(value), samples_of(value, epoch_size=order.epoch_size, sample_tokens=order.sample_tokens)
    if samples is None:
        return value
    return round(epochs * order.steps_in(1) if epochs is not None else samples / order.global_batch_size)


def _takes_optimizer(node: Node) -> bool:
    return "optimizer" in inspect.signature(locate(node["_target_"])).parameters


def _is_scheduler(node: Node) -> bool:
    return next(iter(inspect.signature(locate(node["_target_"])).parameters), "") == "optimizer"


def _scheduler(node: Node, optimizer: torch.optim.Optimizer) -> Any:
    """Build a scheduler for an optimizer, and the schedulers in its node for the same optimizer."""

    def built(value: Any) -> Any:
        if isinstance(value, dict) and "_target_" in value and _is_scheduler(value):
            return _scheduler(value, optimizer)
        return [built(item) for item in value] if isinstance(value, list) else value

    values = {name: built(value) for name, value in node.items() if name not in ("_partial_", "optimizer")}
    return component(values)(optimizer=optimizer)
