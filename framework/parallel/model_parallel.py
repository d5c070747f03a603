"""Model parallelism: the layers of one model are on several devices of one process."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from framework.modules.parts import chain_of, units_of
from framework.modules.tensors import Tree, map_tensors
from framework.parallel.pipelining.chain import costs_of, cut
from framework.runtime.torch_internals import apply_to_own


def place(model: nn.Module, *, devices: Sequence[torch.device], example: Tree | None) -> str:
    """Place the layers in their order so that the largest cost of a device is as small as possible; describe the result.

    The last layers are on the first device, because batches start there and the outputs meet the targets there. A layer's
    arguments are moved to its device. The layers are the model's chain. If the chain is not known, they are the modules that
    the forward calls; their outputs are moved back to the first device, which has the rest of the model.
    """
    home = devices[0]
    links = chain_of(model)
    units = units_of(model) if links is None else links
    groups = sharing_weights(units)
    costs = costs_of(model, units, example=example)
    totals = [sum(costs[i] for i in group) for group in groups]
    cuts = cut(totals, num_stages=min(len(devices), len(groups))) if groups else []
    inside = {id(module) for unit in units for module in unit.modules()}
    for module in model.modules():
        if id(module) not in inside:
            apply_to_own(module, lambda tensor: tensor.to(home))
    for part, device in zip(cuts, [*devices[1 : len(cuts)], home]):
        for unit in [units[i] for number in part for i in groups[number]]:
            unit.to(device)
            unit.register_forward_pre_hook(partial(_move_arguments, device), with_kwargs=True)
            if links is None:
                unit.register_forward_hook(lambda _, __, outputs: _move(outputs, home))
    if len(devices) == 1:
        return f"there is one device ({home}), which has all layers"
    shares = [100 * sum(totals[number] for number in part) / sum(totals) for part in cuts]
    return f"{len(units)} layers on {len(cuts)} devices, with {', '.join(f'{share:.0f}' for share in shares)} % of the work"


def sharing_weights(units: Sequence[nn.Module]) -> list[list[int]]:
    """Group the units that share a weight, which must be on one device; each group takes the place of its last unit."""
    groups: list[tuple[set[int], list[int]]] = []
    for number, unit in enumerate(units):
        weights = {id(parameter) for parameter in nn.Module.parameters(unit)}
        sharing = [group for group in groups if group[0] & weights]
        groups = [group for group in groups if not group[0] & weights]
        groups.append((weights.union(*(w for w, _ in sharing)), sorted([*(i for _, n in sharing for i in n), number])))
    return [numbers for _, numbers in groups]


def _move(tree: Tree, device: torch.device) -> Tree:
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), tree)


def _move_arguments(device: torch.device, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    return _move(given, device), _move(named, device)
