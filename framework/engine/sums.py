"""Sums over samples, which a task measures. Their means divide by the number of samples, or by the task's own weights."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from framework.modules.tensors import WIDEST, tensors_in
from framework.runtime.exits import Unfit

Number = Tensor | float  # a tensor of shape (), or a plain number
Value = Number | tuple[Number, Number]  # a task returns a sum over samples, or a sum and its weight
Sums = dict[str, Tensor]  # by name; the weight of a sum has the name that `weight_of` gives


def over_turns(earlier: Sums, later: Sums) -> Sums:
    """Return the sums of a step's turns: losses are added; other values and weights are from the last turn that has them."""
    loss = ("loss", weight_of("loss"))
    stale = {weight_of(name) for name in later} - {*loss}
    added = {name: earlier[name] + later[name] for name in loss if name in earlier and name in later}
    return {name: value for name, value in earlier.items() if name not in stale} | later | added


def with_loss_of_turn(sums: Sums, turn: str) -> Sums:
    """Return a turn's sums, with its loss also under the name of the turn. Unfit if the task has a value of this name."""
    names = {"loss": f"{turn}_loss", weight_of("loss"): weight_of(f"{turn}_loss")}
    if names["loss"] in sums:
        raise Unfit(f"task: its value {names['loss']} has the name of the loss of a turn (use a new name)")
    return sums | {name: sums[of] for of, name in names.items() if of in sums}


def weight_of(name: str) -> str:
    """Return the name of the weight of a sum."""
    return f"weight of {name}"


def is_weight(name: str) -> bool:
    """Return whether this is the name of the weight of a sum."""
    return name.startswith(weight_of(""))


def as_sums(values: Mapping[str, Value]) -> Sums:
    """Return a task's values as sums and their weights, without gradients. Unfit for any other value."""
    sums: Sums = {}
    for name, value in values.items():
        total, weight = value if isinstance(value, tuple) else (value, 0)
        sums[name] = _number(total, name, values)
        if isinstance(value, tuple):
            weight = _number(weight, name, values)
            sums[weight_of(name)] = weight.to(WIDEST[weight.device.type])
    return sums


def _number(item: Number, name: str, values: Mapping[str, Value]) -> Tensor:
    if isinstance(item, Tensor) and item.ndim == 0:
        # 16 bits: sums over micro-batches would round as often as there are of them
        return item.detach() if item.element_size() > 2 or not item.is_floating_point() else item.detach().float()
    if not isinstance(item, (int, float)):
        kind = f"of shape {list(item.shape)}" if isinstance(item, Tensor) else f"a {type(item).__name__}"
        raise Unfit(f"task: {name} is {kind} (a sum over the samples, and its weight, is a number or a tensor of shape ())")
    device = next((tensor.device for tensor in tensors_in(dict(values))), None)
    return torch.tensor(item, dtype=WIDEST[device.type if device else "cpu"], device=device)


def loss_in(values: Mapping[str, Value]) -> Tensor:
    """Return the sum of the losses, with its gradient."""
    loss = values["loss"]
    total = loss[0] if isinstance(loss, tuple) else loss
    if not isinstance(total, Tensor):
        raise TypeError(f"loss is a {type(total).__name__}, but it must be a tensor, whose gradient is computed")
    return total


def add(sums: Sums, more: Sums) -> None:
    """Add `more` to `sums`, in place."""
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value


def means(sums: Sums, *, num_samples: int) -> dict[str, float]:
    """Return the means of the sums over all ranks; nan if a weight is zero."""
    totals = {name: total.item() for name, total in sums.items()}
    weights = {weight_of(name) for name in totals}
    found: dict[str, float] = {}
    for name in (name for name in totals if name not in weights):
        weight = totals.get(weight_of(name), num_samples)
        found[name] = totals[name] / weight if weight else math.nan
    return found
