"""The average of the ranks' optimizer states, also if a rank has no state for a parameter that its samples did not need."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from framework.distributed.agreement import Agreement
from framework.distributed.buckets import broadcast_all, sum_all

_Place = tuple[int, str]  # a parameter's number, and the name of a value in its state


@torch.no_grad()
def average_states(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], *, agreement: Agreement, num_ranks: int
) -> None:
    """Give every rank the same state for each parameter. Collective.

    A number with decimals is the mean over the ranks that have it. Other values, such as counts and flags, are those of the
    first rank that has them.
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
    for key in keys:
        description = first[key][1]
        if isinstance(description, dict):  # of a tensor
            mine.setdefault(key, _zeros(description, parameters[key[0]]))
        else:
            mine[key] = description[0]
    tensors = {key: mine[key] for key in keys if isinstance(mine[key], Tensor)}
    averaged = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point() or tensor.is_complex()}
    sum_all(averaged.values())
    for key, tensor in averaged.items():
        tensor.div_(counts[key])
    of_ranks: dict[int, list[Tensor]] = {}
    for key, tensor in tensors.items():
        if key not in averaged:
            of_ranks.setdefault(first[key][0], []).append(tensor)
    broadcast_all(of_ranks)
    for (number, name), value in mine.items():
        optimizer.state[parameters[number]][name] = value


def _description(value: Any, parameter: nn.Parameter) -> Any:
    """Return what another rank needs to make a place for a tensor; any other value as the only item of a list."""
    if not isinstance(value, Tensor):
        return [value]
    return {"shape": list(value.shape), "dtype": str(value.dtype), "is_beside": value.device == parameter.device}


def _zeros(description: dict[str, Any], parameter: nn.Parameter) -> Tensor:
    dtype = getattr(torch, description["dtype"].removeprefix("torch."))
    return torch.zeros(description["shape"], dtype=dtype, device=parameter.device if description["is_beside"] else "cpu")
