"""The state of an optimizer and a model besides tensors: values in parameter groups and states, and a module's extra state.

It is written as JSON with the type of each value, so that nothing needs to be unpickled.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.checkpoint.state import PlainState, SavedGroup
from framework.distributed.agreement import exact_text
from framework.distributed.world import World
from framework.modules.tensors import in_order, order_of
from framework.optim.update import Average, group_values
from framework.runtime.exits import Unfit
from framework.runtime.problem import shown

_LARGEST = 4096  # the most elements of a tensor that is written as numbers
_CHANNELS_LAST = [0, 2, 3, 1]  # the order in memory of (B, C, H, W)
_EXTRA = "_extra_state"  # torch's name for the result of a module's get_extra_state()


class PartsState(Protocol):
    """The state of a run's parts, by paths: tensors, and other values in encoded form.

    Tensors are loaded in place. `loaded` contains them, and those that a new part does not have yet or with another shape.
    """

    def tensors(self) -> dict[str, Tensor]: ...

    def plain(self) -> dict[str, Any]: ...

    def give_back(self, plain: Mapping[str, Any], loaded: Mapping[str, Tensor]) -> None: ...


class TrainingState(NamedTuple):
    """The objects of a run with state that a checkpoint keeps."""

    module: nn.Module
    optimizer: Optimizer
    average: Average | None
    task: nn.Module | None = None  # its buffers are kept
    parts: PartsState | None = None


class NotSerializable(TypeError):
    """A value that cannot be written as plain data. The message names its type."""


def encoded(value: Any) -> Any:
    """Return a value as JSON: a number, a text, a small tensor, a list or dictionary of these. Else raise NotSerializable."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.generic):
        return encoded(value.item())
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return {type(value).__name__: [encoded(item) for item in value]}
    if isinstance(value, dict) and type(value) is dict:
        return {"dict": [[encoded(key), encoded(item)] for key, item in value.items()]}
    if type(value) is Tensor and value.numel() <= _LARGEST and not value.is_complex():
        numbers = [encoded(number) for number in value.detach().flatten().tolist()]
        kind = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        return {"tensor": numbers, **kind, **({} if value.is_contiguous() else {"order": order_of(value)})}
    size = f" with {value.numel():,} numbers" if isinstance(value, Tensor) else ""
    raise NotSerializable(f"a value of type {type(value).__name__}{size}")


def decoded(data: Any, *, like: Any = None) -> Any:
    """Return the value that `encoded` received; a tensor is on the device of `like`. Raise ValueError for any other data."""
    if not isinstance(data, dict):
        return data
    match data:
        case {"float": str(text)}:
            return float(text)
        case {"list": list(items)}:
            return [decoded(item) for item in items]
        case {"tuple": list(items)}:
            return tuple(decoded(item) for item in items)
        case {"dict": list(pairs)}:
            return {decoded(key): decoded(item) for key, item in pairs}
        case {"tensor": list(numbers), "shape": list(shape), "dtype": str(name)} if isinstance(
            dtype := getattr(torch, name, None), torch.dtype
        ):
            device = like.device if isinstance(like, Tensor) else None
            found = torch.tensor([decoded(number) for number in numbers], dtype=dtype, device=device).reshape(shape)
            order: Any = data.get("order")
            is_order = isinstance(order, list) and all(isinstance(dim, int) for dim in order)
            return in_order(found, order) if is_order else found
    raise ValueError(f"{str(data)[:60]} is not a value that a run writes")


# --- the optimizer's groups


def changed_values(optimizer: Optimizer, initial: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each group the values that it has changed or added since `initial`."""
    return [
        {key: value for key, value in now.items() if key not in before or exact_text(value) != exact_text(before[key])}
        for now, before in zip(group_values(optimizer), initial)
    ]


# --- the whole state


def plain_state_of(held: TrainingState, *, initial: Sequence[Mapping[str, Any]]) -> PlainState:
    """Return the plain state of this rank. `initial` are the groups' values from the construction of the optimizer."""
    module, optimizer = held.module, held.optimizer
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    kept = PlainState()
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            raise NotSerializable(f"{shown(parameter)}, an entry that belongs to no parameter")
        plain = {key: encoded(value) for key, value in state.items() if value is not None and not isinstance(value, Tensor)}
        if id(parameter) not in names:
            continue
        name = names[id(parameter)]
        kept.numbers |= {name: plain} if plain else {}
        for key, value in state.items():
            if isinstance(value, Tensor) and not _is_laid_out_like(value, parameter):
                kept.orders[f"optimizer/{name}/{key}"] = order_of(value)
    for group, changed in zip(optimizer.param_groups, changed_values(optimizer, initial)):
        own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        if own and changed:
            kept.groups.append(SavedGroup(names=own, values={key: encoded(value) for key, value in changed.items()}))
    kept.extra = extra_state(module)
    kept.parts = held.parts.plain() if held.parts is not None else {}
    orders = {name: order_of(tensor) for name, tensor in reordered(held).items()}
    kept.orders |= {name: order for name, order in orders.items() if order not in (sorted(order), _CHANNELS_LAST)}
    return kept


def _is_laid_out_like(value: Tensor, parameter: Tensor) -> bool:
    """Return whether a state has the layout of a new one for its parameter."""
    return value.stride() == parameter.stride() if value.shape == parameter.shape else value.is_contiguous()


def reordered(held: TrainingState) -> dict[str, Tensor]:
    """Return the live tensors, by their names in a checkpoint, whose dims may get another order in memory in training.

    (Those of the parameters, and images with the channels last, are the model's.)
    """
    found = {f"model/{name}": buffer for name, buffer in held.module.named_buffers()}
    found |= {f"task/{name}": buffer for name, buffer in held.task.named_buffers()} if held.task is not None else {}
    return found | {f"part/{name}": tensor for name, tensor in (held.parts.tensors() if held.parts is not None else {}).items()}


def extra_state(module: nn.Module) -> dict[str, Any]:
    """Return the results of the modules' get_extra_state(), by their names in the state dict."""
    return {name: encoded(value) for name, value in module.state_dict(keep_vars=True).items() if not isinstance(value, Tensor)}


def require_same_parts(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise Unfit if several ranks keep the same path of a part's state with different values."""
    for other in states:
        if odd := [name for name, value in other.items() if states[0].get(name, value) != value]:
            key = odd[0].replace("/", ".")
            raise Unfit(f"part.{key}: differs between the processes (sum, gather and any of the loop let them agree)")


def plain_state_of_all(held: TrainingState, *, initial: Sequence[Mapping[str, Any]], world: World) -> PlainState:
    """Return the plain state of all ranks. Collective. Raise Unfit, on every rank, if ranks differ in a common entry."""
    mine = plain_state_of(held, initial=initial).model_dump()
    return world.agreement.judged(mine, lambda found: merged([PlainState.model_validate(part) for part in found.values()]))


def merged(parts: Sequence[PlainState]) -> PlainState:
    """Return the plain state of all ranks. Raise Unfit if ranks differ in a common entry."""
    require_same_parts([part.parts for part in parts])
    whole, seen = PlainState(parts=parts[0].parts), dict[str, SavedGroup]()
    for part in parts:
        for name, values in part.numbers.items():
            if whole.numbers.setdefault(name, values) != values:
                raise Unfit(f"optimizer: its state of {name} differs between the processes: {values}, {whole.numbers[name]}")
        for group in part.groups:
            first = seen.setdefault(group.names[0], group)
            if first is group:
                whole.groups.append(group)
            elif first != group:
                raise Unfit(f"optimizer: its groups differ between the processes: {group.values}, {first.values}")
        whole.extra, whole.orders = part.extra | whole.extra, part.orders | whole.orders
    return whole


def restore_plain(kept: PlainState, held: TrainingState, *, loaded: Mapping[str, Tensor]) -> None:
    """Restore this rank's plain state, and give the parts their `loaded` tensors.

    Raise ValueError if parameters that share a group had different values.
    """
    module, optimizer = held.module, held.optimizer
    by_name = {name: group.values for group in kept.groups for name in group.names}
    parameters = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        values = [by_name.get(names[id(parameter)], {}) for parameter in group["params"] if id(parameter) in names]
        if any(other != values[0] for other in values):
            raise ValueError(f"parameters that share a group of this optimizer had different values of {', '.join(values[0])}")
        for key, value in values[0].items() if values else ():
            group[key] = decoded(value, like=group.get(key))
        for parameter in group["params"]:
            for key, value in kept.numbers.get(names.get(id(parameter), ""), {}).items():
                optimizer.state[parameter][key] = decoded(value)
    set_extra_state(module, kept.extra)
    if held.parts is not None:
        held.parts.give_back(kept.parts, loaded)


def set_extra_state(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Restore the modules' extra state, in the form that `extra_state` returns."""
    for name, value in extra.items():
        module.get_submodule(name.removesuffix(_EXTRA).rstrip(".")).set_extra_state(decoded(value))
