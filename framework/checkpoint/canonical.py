"""The state in one form for all strategies: tensors under the model's own names. No file depends on the world size."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.checkpoint.chunks import chunks_of
from framework.checkpoint.format import Inventory, Kinds, inventory_of, read_regions
from framework.checkpoint.manifest import read_manifest
from framework.checkpoint.plain_state import PlainState, TrainingState, reordered, restore_plain
from framework.distributed.world import World
from framework.modules.tensors import in_order, whole, whole_like


def state_tensors(held: TrainingState) -> dict[str, Tensor]:
    """Return this rank's `model/NAME`, `optimizer/NAME/KEY`, `average/NAME`, `task/NAME`, `part/NAME/KEY` (plain or DTensor).

    The optimizer's state is read here by parameter name. torch's get_state_dict is not used: without a state it takes fake
    optimizer steps, which change the training (pytorch#164929).
    """
    tensors = _tensors_but_optimizer(held)
    for name, parameter in held.module.named_parameters():
        for key, value in held.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
    return tensors


def _tensors_but_optimizer(held: TrainingState) -> dict[str, Tensor]:
    averages = held.average.tensors if held.average is not None else {}
    of_task = held.task.state_dict(keep_vars=True) if held.task is not None else {}
    buffers = {name: value for name, value in of_task.items() if not isinstance(value, nn.Parameter)}
    return (
        model_tensors(held.module)
        | {f"average/{name}": value for name, value in averages.items()}
        | {f"task/{name}": value for name, value in buffers.items()}
        | {f"part/{name}": value for name, value in (held.parts.tensors() if held.parts is not None else {}).items()}
    )


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the model's state as `model/NAME`. A tied weight occurs once, under its first name; loading fills the others."""
    first_names: dict[int, str] = {}
    tensors = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and first_names.setdefault(id(value), name) == name:
            tensors[f"model/{name}"] = value.detach()
    return tensors


def _inventory(path: Path) -> Inventory:
    """Return a verified checkpoint's tensors."""
    return inventory_of(path, sorted(read_manifest(path)))


def restore(path: Path, kept: PlainState, held: TrainingState, *, world: World) -> None:
    """Load a verified checkpoint, and the plain values in `kept`, into the run's objects. Reshard if necessary. Collective.

    Raise ValueError, on every rank and before a number changes, if the names, shapes or dtypes do not match the model's.
    """
    for name, tensor in reordered(held).items() if kept.orders else ():
        tensor.data = in_order(tensor.detach(), kept.orders.get(name, []))
    inventory, targets = _matched(path, held, world=world)
    parts = {name: tensor for name, tensor in targets.items() if name.startswith("part/")}
    for name, tensor in parts.items() if kept.orders else ():  # state_dict() may return other tensors each time
        tensor.data = in_order(tensor.detach(), kept.orders.get(name, []))
    module, optimizer = held.module, held.optimizer
    states = _optimizer_targets(inventory, module, optimizer)
    for name, own in states.items():
        own |= {key: in_order(value, kept.orders.get(f"optimizer/{name}/{key}", [])) for key, value in own.items()}
    targets |= {f"optimizer/{name}/{key}": value for name, state in states.items() for key, value in state.items()}
    world.agreement.all_or_fail(lambda: read_regions(path, inventory, chunks_of(targets)), what=f"{path} could not be read")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    # a parameter of a rank that updates nothing (optim.stand_in) has no name
    state = {i: states[names[id(p)]] for i, p in enumerate(_optimized(optimizer)) if names.get(id(p)) in states}
    load_states(optimizer, state)
    restore_plain(kept, held, loaded={name.removeprefix("part/"): tensor for name, tensor in parts.items()})


def misfit(path: Path, held: TrainingState, *, world: World) -> str | None:
    """Return why a verified checkpoint does not fit the run's objects, or None. Collective. This changes nothing."""
    try:
        _matched(path, held, world=world)
    except ValueError as error:
        return str(error)
    return None


def _matched(path: Path, held: TrainingState, *, world: World) -> tuple[Inventory, dict[str, Tensor]]:
    """Return a checkpoint's inventory, and its target tensors (without the optimizer's).

    Collective. Raise ValueError, on every rank, if checkpoint and targets do not match.
    """
    agreement = world.agreement
    # each rank that has saved has written a header: if all N ranks read all headers, the file system would open N x N files
    inventory = agreement.on_rank_0(lambda: _inventory(path), what=f"{path} could not be read")
    targets = _tensors_but_optimizer(held)
    names = set[str]().union(*agreement.distinct(sorted(targets)).values())
    fresh = _fresh_parts(inventory, targets, held.module, names=names)
    targets |= fresh
    everywhere = names.union(*agreement.distinct(sorted(fresh)).values())
    faults = agreement.distinct(_fault(inventory, targets, everywhere=everywhere, is_fit=operator.eq))
    if fault := next(filter(None, faults.values()), ""):
        raise ValueError(fault)
    return inventory, targets


def load_states(optimizer: Optimizer, states: dict[int, dict[str, Tensor]]) -> None:
    """Give an optimizer its states, by the positions of its parameters.

    This uses load_state_dict, which moves each value to the device that this optimizer needs. But load_state_dict also casts
    to the parameter's type. This would change a state such as momentum in bfloat16 or a mask, so the type is restored.
    """
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    for number, parameter in enumerate(_optimized(optimizer)):
        live = optimizer.state.get(parameter, {})
        for key, value in states.get(number, {}).items():
            if key in live and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)


def _fresh_parts(inventory: Inventory, targets: dict[str, Tensor], module: nn.Module, *, names: set[str]) -> dict[str, Tensor]:
    """Return empty tensors for the stored states of parts that have no tensor, or a tensor of another shape or type.

    Each is cut like a parameter of the same name and shape. `names` are the names on all ranks: a state of another rank's
    parameter is left to that rank.
    """
    parameters = dict(module.named_parameters())
    fresh: dict[str, Tensor] = {}
    for name, entry in inventory.items() if any(name.startswith("part/") for name in inventory) else ():
        own = name.rpartition("/")[2]
        live = targets.get(name)
        is_live = live is not None and live.shape == entry.shape and live.dtype == entry.dtype
        if not name.startswith("part/") or is_live or (own not in parameters and f"model/{own}" in names):
            continue
        parameter = parameters.get(own)
        like = parameter if parameter is not None and parameter.shape == entry.shape else torch.empty(entry.shape)
        fresh[name] = torch.empty_like(like.detach(), dtype=entry.dtype)
    return fresh


def load_evaluated(path: Path, *, module: nn.Module) -> None:
    """Load the weights that training evaluates: a verified checkpoint's average, if it has an average. Not collective.

    `module` must be whole. Loading casts to its floating-point type. Raise ValueError, before a number changes, if the names or
    shapes do not match the model's.
    """
    inventory = _inventory(path)
    averages = {name.replace("average/", "model/", 1): name for name in inventory if name.startswith("average/")}
    weights = {name: inventory[averages.get(name, name)] for name in inventory if name.startswith("model/")}
    targets = model_tensors(module)
    if fault := _fault(weights, targets, everywhere=set(targets), is_fit=_casts):
        raise ValueError(fault)
    read_regions(path, inventory, chunks_of({averages.get(name, name): value for name, value in targets.items()}))


def _casts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return stored == wanted or (stored.is_floating_point and wanted.is_floating_point)


def _fault(
    inventory: Inventory, targets: dict[str, Tensor], *, everywhere: set[str], is_fit: Callable[[Any, Any], bool]
) -> str:
    """Return how stored tensors differ from their targets, or an empty string if they match."""
    kinds = {name.split("/")[0] for name in everywhere}
    stored = {name for name in inventory if name.split("/")[0] in kinds}
    faults = [f"{name} is not in the checkpoint" for name in sorted(targets.keys() - stored)]
    faults += [f"{name} is not in this run" for name in sorted(stored - everywhere)]
    for name in sorted(stored & targets.keys()):
        entry, target = inventory[name], targets[name]
        if entry.shape != target.shape or not is_fit(entry.dtype, target.dtype):
            faults.append(f"{name} is {entry.dtype} {list(entry.shape)} in the checkpoint, "
                          f"{target.dtype} {list(target.shape)} in this run")  # fmt: skip
    return "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")


def _optimizer_targets(inventory: Inventory, module: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return empty tensors for every stored state of this rank's optimizer.

    A tensor is cut like the parameter if the shapes are equal. Otherwise it is whole on every rank, but of the parameter's
    kind, so that an operation can use both.
    """
    optimized = {id(parameter) for parameter in _optimized(optimizer)}
    states: dict[str, dict[str, Tensor]] = {}
    parameters = dict(module.named_parameters())
    for stored, entry in inventory.items():
        kind, *words = stored.split("/")  # names and keys may have slashes: the longest name of a parameter counts
        splits = ("/".join(words[:count]) for count in range(len(words) - 1, 0, -1))
        name = next((split for split in splits if split in parameters), "") if kind == "optimizer" else ""
        if not name or id(parameter := parameters[name]) not in optimized:
            continue
        if entry.shape == parameter.shape:
            empty = torch.empty_like(parameter.detach(), dtype=entry.dtype)
        else:
            empty = whole_like(parameter, torch.empty(entry.shape, dtype=entry.dtype))
        states.setdefault(name, {})[stored.removeprefix(f"optimizer/{name}/")] = empty
    return states


def _optimized(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# --- tensors of all ranks on rank 0, for a file


def gathered(own: Mapping[str, Tensor], *, world: World) -> tuple[Kinds, Iterator[Tensor]]:
    """Gather tensors, plain or sharded, each from the first rank that has it. Collective.

    Return their kinds by name, and in this order, on rank 0, the whole tensors one by one, on the CPU. Every rank must iterate
    to the end, because the iteration is collective.
    """
    agreement, found = world.agreement, dict[str, tuple[torch.dtype, Sequence[int], int]]()
    for rank, table in enumerate(agreement.to_rank_0({name: (value.dtype, value.shape) for name, value in own.items()})):
        for name, kind in table.items():
            found.setdefault(name, (*kind, rank))
    found = agreement.from_rank_0(dict(sorted(found.items(), key=lambda item: (-item[1][0].itemsize, item[0]))))

    def stream() -> Iterator[Tensor]:
        for name, (dtype, shape, sender) in found.items():
            value = whole(own[name]).detach().to("cpu").contiguous() if name in own else torch.empty(shape, dtype=dtype)
            if world.rank == sender != 0:
                dist.send(value, dst=0, group=agreement.group)
            elif world.rank == 0:
                if sender:
                    dist.recv(value, src=sender, group=agreement.group)
                yield value

    return {name: (dtype, shape) for name, (dtype, shape, _) in found.items()}, stream()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors under all their names, without the modules' other state."""
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
