"""A model as a chain of modules, cut into stages of about equal cost."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from framework.modules.nested import Tree, call, map_tensors


def stray_parameters(model: nn.Module, links: Sequence[nn.Module]) -> list[str]:
    """Return the names of the parameters that belong to no link."""
    linked = {id(parameter) for link in links for parameter in link.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in linked]


class Shapes:
    """What goes in and out of each link of a chain: shapes and types, found without computing a number.

    It works on copies of the links, without storage: the links themselves may be cut, or dropped, later.
    """

    def __init__(self, links: Sequence[nn.Module]) -> None:
        self._links = [on_meta(link)[0] for link in links]
        self._found: dict[Any, list[Tensor]] = {}

    def outputs(self, inputs: Tree) -> list[Tensor]:
        """Return each link's output, as meta tensors, for a batch like `inputs`."""
        shape = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), inputs)
        key = repr(shape)
        if key not in self._found:
            self._found[key] = list(self._run(shape))
        return self._found[key]

    def _run(self, value: Tree) -> Iterator[Tensor]:
        for link in self._links:
            with torch.no_grad():
                value = call(link, value)
            yield value


def on_meta(model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """Return a copy for evaluation, without storage, and its modules by the ids of the model's."""
    copies: dict[int, Any] = {id(t): t.detach().to("meta") for t in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, copies)
    for module in copied.modules():
        module.__dict__.pop("forward", None)  # a wrapper (recomputation, compilation) around the original's
    return copied.eval(), copies


def costs_of(model: nn.Module, units: Sequence[nn.Module], *, example: Tree | None) -> list[int]:
    """Return what each of the model's units costs: floating-point operations for a batch, and a little for each weight.

    Weights alone if the kind of batch is not known, or if the model asks for numbers, not only for shapes.
    """
    weights = [1 + sum(p.numel() for p in unit.parameters()) for unit in units]
    if example is None:
        return weights
    copied, copies = on_meta(model)
    units = [copies[id(unit)] for unit in units]
    try:
        with torch.no_grad(), _flops_of(units) as flops:
            call(copied, example)
    except (NotImplementedError, RuntimeError):
        return weights
    return [size + flops.get(id(unit), 0) // units.count(unit) for size, unit in zip(weights, units)]


@contextmanager
def _flops_of(units: Sequence[nn.Module]) -> Iterator[dict[int, int]]:
    """Count the operations of each unit, by its id, over all its calls."""
    flops: dict[int, int] = {}
    with FlopCounterMode(display=False) as counter:

        def begin(unit: nn.Module, _: Any) -> None:
            flops[id(unit)] = flops.get(id(unit), 0) - counter.get_total_flops()

        def end(unit: nn.Module, *_: Any) -> None:
            flops[id(unit)] += counter.get_total_flops()

        for unit in dict.fromkeys(units):
            unit.register_forward_pre_hook(begin)
            unit.register_forward_hook(end)
        yield flops


def weighty(links: Sequence[nn.Module]) -> list[range]:
    """Group the links so that each group has weights: those without go with the one before, or at the start after, them."""
    starts = [i for i, link in enumerate(links) if any(True for _ in link.parameters())]
    return [range(start, end) for start, end in zip([0, *starts[1:]], [*starts[1:], len(links)])]


def cut(costs: Sequence[int], *, num_stages: int) -> list[range]:
    """Cut a row of costs into stages, none of them empty, so that the dearest is as cheap as can be."""
    # best[s][n]: the least cost of the dearest of s stages that hold the first n links, and where the last one starts
    totals = [0]
    for cost in costs:
        totals.append(totals[-1] + cost)
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for stage in range(1, num_stages + 1):
        best.append({})
        for end in range(stage, len(costs) - (num_stages - stage) + 1):
            best[stage][end] = min(
                (max(before, totals[end] - totals[start]), start)
                for start, (before, _) in best[stage - 1].items()
                if start < end
            )
    stages, end = [], len(costs)
    for stage in range(num_stages, 0, -1):
        start = best[stage][end][1]
        stages.append(range(start, end))
        end = start
    return stages[::-1]
