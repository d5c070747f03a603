"""The average of the ranks' optimizer states, also if a rank has no state for a parameter that its samples did not need."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from framework.distributed.agreement import Agreement
from framework.distributed.buckets import broadcast_all, sum_all
from framework.modules.tensors import map_tensors

_Place = tuple[int, str]  # a parameter's number, and the name of a value in its state


@torch.no_grad()
def average_states(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], *, agreement: Agreement, num_ranks: int
) -> None:
    """Give every rank the same state for each parameter. Collective.

    A number with decimals is the mean over the ranks that have the value. Other values, such as counts and flags, are those of
    the first rank that has them. A value may be a list or a mapping of tensors.
    """
    states = [optimizer.state.get(parameter) or {} for parameter in parameters]
    # sorted, because a state from a checkpoint has another order than a state from steps, and the place of a tensor among the
    # others decides in which order a ring sums it
    mine = {(number, name): state[name] for number, state in enumerate(states) for name in sorted(state)}
    known = agreement.distinct([(key, _description(value, parameters[key[0]])) for key, value in mine.items()])
    first: dict[_Place, tuple[int, Any]] = {}  # the first rank that has a value, and the value's description
    for rank, items in known.items():
        for key, description in items:
            first.setdefault(key, (rank, description))
    keys = sorted(first)
    having = torch.tensor([float(key in mine) for key in keys], dtype=torch.float64)
    num_having = having * num_ranks if len(known) == 1 else agreement.sum(having)
    counts = dict(zip(keys, num_having.tolist()))
    mine = {key: _like(first[key][1], mine.get(key), parameters[key[0]]) for key in keys}
    tensors = [(key, tensor) for key in keys for tensor in _tensors(mine[key])]
    averaged = [(key, tensor) for key, tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    sum_all(tensor for _, tensor in averaged)
    for key, tensor in averaged:
        tensor.div_(counts[key])
    of_ranks: dict[int, list[Tensor]] = {}
    for key, tensor in tensors:
        if not tensor.is_floating_point() and not tensor.is_complex():
            of_ranks.setdefault(first[key][0], []).append(tensor)
    broadcast_all(of_ranks)
    for (number, name), value in mine.items():
        optimizer.state[parameters[number]][name] = value


def _description(value: Any, parameter: nn.Parameter) -> Any:
    """Return a value of plain data, with the shape of each tensor in place of its numbers."""
    if isinstance(value, Tensor):
        return "tensor", list(value.shape), str(value.dtype), value.device == parameter.device
    if isinstance(value, dict):
        return "dict", {key: _description(item, parameter) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_description(item, parameter) for item in value]
    return "plain", value


def _like(description: Any, own: Any, parameter: nn.Parameter) -> Any:
    """Return the described value, with this rank's own tensors. A tensor that this rank does not have is zero."""
    kind, content, *more = description
    if kind == "tensor":
        dtype, is_beside = getattr(torch, more[0].removeprefix("torch.")), more[1]
        fits = isinstance(own, Tensor) and list(own.shape) == content
        return own if fits else torch.zeros(content, dtype=dtype, device=parameter.device if is_beside else "cpu")
    if kind == "dict":
        held = own if isinstance(own, dict) else {}
        return {key: _like(item, held.get(key), parameter) for key, item in content.items()}
    if kind in ("list", "tuple"):
        items = [*own] if isinstance(own, (list, tuple)) else []
        items = [_like(item, items[place] if place < len(items) else None, parameter) for place, item in enumerate(content)]
        return items if kind == "list" else tuple(items)
    return content


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return found
