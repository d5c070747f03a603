"""State in one form: tensors under the model's own names, whatever the strategy. Nothing on disk knows the world size."""

import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.distributed.world import World
from framework.modules.tensors import whole
from framework.optim.update import AveragedWeights


def state_tensors(module: nn.Module, optimizer: Optimizer, average: AveragedWeights | None) -> dict[str, Tensor]:
    """Return `model/NAME`, `optimizer/NAME/KEY` and `average/NAME`, as they are on this rank (plain or DTensor).

    The optimizer's state is read by parameter name here, not through torch's get_state_dict, which takes fake
    optimizer steps when there is no state yet and so changes training (pytorch#164929).
    """
    tensors = model_tensors(module) | _average_tensors(average)
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"optimizer/{name}/{key}"] = value
    return tensors


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the model's state as `model/NAME`; a tied weight once, under its first name: loading it fills the others."""
    first_names: dict[int, str] = {}
    tensors = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if first_names.setdefault(id(value), name) == name:
            tensors[f"model/{name}"] = value.detach()
    return tensors


def _average_tensors(average: AveragedWeights | None) -> dict[str, Tensor]:
    return {f"average/{name}": value for name, value in average.tensors.items()} if average is not None else {}


def _open(path: Path) -> tuple[Any, Mapping[str, Any]]:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(path))
    return reader, reader.read_metadata().state_dict_metadata


def restore(path: Path, *, module: nn.Module, optimizer: Optimizer, average: AveragedWeights | None, world: World) -> None:
    """Load a verified checkpoint into the run's objects, resharding as needed. Collective.

    ValueError, before anything has changed, if names, shapes or dtypes are not the model's.
    """
    from torch.distributed.checkpoint import load  # a second, not spent unless needed

    reader, inventory = _open(path)
    targets = model_tensors(module) | _average_tensors(average)
    everywhere = set().union(*world.agreement.gather(set(targets)))
    _check(inventory, targets, everywhere=everywhere, is_fit=operator.eq)
    states = _optimizer_targets(inventory, module, optimizer)
    targets |= {f"optimizer/{name}/{key}": value for name, state in states.items() for key, value in state.items()}
    load(targets, storage_reader=reader, **world.agreement.among())
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    # the parameter of a rank that updates nothing (optim.stand_in) has no name
    state = {i: states[names[id(p)]] for i, p in enumerate(_optimized(optimizer)) if names.get(id(p)) in states}
    # through load_state_dict, which puts each value on the device and into the dtype that this optimizer wants
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def load_evaluated(path: Path, *, module: nn.Module) -> None:
    """Load the weights that training evaluates: a verified checkpoint's average if it has one. Not collective.

    `module` is whole; loading casts to its floating-point type. ValueError, before anything has changed, if names or
    shapes are not the model's.
    """
    from torch.distributed.checkpoint import load

    reader, inventory = _open(path)
    averages = {name.replace("average/", "model/", 1): name for name in inventory if name.startswith("average/")}
    weights = {name: inventory[averages.get(name, name)] for name in inventory if name.startswith("model/")}
    targets = model_tensors(module)
    _check(weights, targets, everywhere=set(targets), is_fit=_casts)
    load({averages.get(name, name): value for name, value in targets.items()}, storage_reader=reader, no_dist=True)


def _casts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return stored == wanted or (stored.is_floating_point and wanted.is_floating_point)


def _check(
    inventory: Mapping[str, Any], targets: dict[str, Tensor], *, everywhere: set[str], is_fit: Callable[[Any, Any], bool]
) -> None:
    kinds = {name.split("/")[0] for name in everywhere}
    stored = {name for name in inventory if name.split("/")[0] in kinds}
    faults = [f"{name} is not in the checkpoint" for name in sorted(targets.keys() - stored)]
    faults += [f"{name} is not in this run" for name in sorted(stored - everywhere)]
    for name in sorted(stored & targets.keys()):
        entry, target = inventory[name], targets[name]
        if entry.size != target.shape or not is_fit(entry.properties.dtype, target.dtype):
            faults.append(f"{name} is {entry.properties.dtype} {list(entry.size)} in the checkpoint, "
                          f"{target.dtype} {list(target.shape)} in this run")  # fmt: skip
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ValueError("; ".join(faults[:5]) + more)


def _optimizer_targets(inventory: Mapping[str, Any], module: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return empty tensors for every stored state of this rank's optimizer, cut like the parameter if the shape is the same."""
    optimized = {id(parameter) for parameter in _optimized(optimizer)}
    states: dict[str, dict[str, Tensor]] = {}
    for name, parameter in module.named_parameters():
        if id(parameter) not in optimized:
            continue
        prefix = f"optimizer/{name}/"
        for stored, entry in inventory.items():
            key = stored.removeprefix(prefix)
            if stored.startswith(prefix) and "/" not in key:
                like = parameter if entry.size == parameter.shape else torch.empty(entry.size)
                states.setdefault(name, {})[key] = torch.empty_like(like.detach(), dtype=entry.properties.dtype)
    return states


def _optimized(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def full_weights(module: nn.Module, *, world: World) -> dict[str, Tensor]:
    """Return the whole model on the CPU of rank 0, a separate tensor for every name; on other ranks, their part.

    Collective: shards are gathered one by one, and rank 0 receives what it does not have.
    """
    # copies: tied weights must not share memory
    weights = {name: whole(value).detach().to("cpu", copy=True).contiguous() for name, value in module.state_dict().items()}
    held = world.agreement.gather({name: (value.shape, value.dtype) for name, value in weights.items()})
    senders: dict[str, int] = {}
    for rank, names in enumerate(held):
        for name in names:
            senders.setdefault(name, rank)
    for name, sender in senders.items():
        if sender != 0 and world.rank == 0:
            shape, dtype = held[sender][name]
            weights[name] = world.agreement.receive(torch.empty(shape, dtype=dtype), source=sender)
        elif sender == world.rank != 0:
            world.agreement.send(weights[name], to=0)
    return weights
