"""A model in a table: its modules, what they return, their parameters and operations."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from framework.modules.tensors import Tree, call, first_tensor
from framework.modules.trace import on_meta

_DEPTH = 3  # of names: what is deeper is counted with what holds it


@dataclass(frozen=True)
class Layer:
    """A module, or several of one kind that follow each other. Numbers are those of one of them."""

    name: str
    kind: str
    count: int
    shape: str  # of what it returns
    parameters: int
    trained: int
    flops: int | None  # of a forward pass for one sample, a multiply-add as two; None if not known


def summary(model: nn.Module, *, example: Tree | None) -> list[dict[str, Any]]:
    """Return the model's modules with parameters, from the outside inwards, as plain data; the first is the model itself.

    `example` are the inputs of two samples; None, or a model that reads numbers: neither shapes nor operations are known.
    """
    shapes, flops = ({}, {}) if example is None else _of_forward(model, example)
    layers: list[Layer] = []
    for name, module in model.named_modules():
        parameters = list(module.parameters())
        if not parameters or name.count(".") >= _DEPTH:
            continue
        sizes = (sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad))
        layers.append(Layer(name, type(module).__name__, 1, shapes.get(name, ""), *sizes, flops.get(name)))
    return [asdict(layer) for layer in _joined(layers)]


def _of_forward(model: nn.Module, example: Tree) -> tuple[dict[str, str], dict[str, int]]:
    shapes: dict[str, str] = {}
    try:
        copied, _ = on_meta(model)
        for name, module in copied.named_modules():

            def note(_: nn.Module, __: object, output: Any, name: str = name) -> None:
                returned = first_tensor(output)
                if returned is not None:
                    shapes.setdefault(name, " x ".join(map(str, ["N", *returned.shape[1:]])))

            module.register_forward_hook(note)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call(copied, example)
    except Exception:  # a user's model: it may read numbers, not only shapes
        return {}, {}
    root = type(copied).__name__
    counts = {path: sum(of_path.values()) // 2 for path, of_path in counter.get_flop_counts().items()}
    return shapes, {path.removeprefix(root).lstrip("."): count for path, count in counts.items() if path.startswith(root)}


def _joined(layers: list[Layer]) -> list[Layer]:
    """Join modules that follow each other and differ in a number of their name alone; what they hold is that of the first."""
    rows: list[Layer] = []
    left_out: list[str] = []
    first: dict[tuple[str, ...], int] = {}  # rows that may stand for several
    for layer in layers:
        if any(layer.name.startswith(f"{name}.") for name in left_out):
            continue
        parent, _, last = layer.name.rpartition(".")
        alike = (parent, layer.kind, layer.shape, str(layer.parameters), str(layer.trained), str(layer.flops))
        place = first.get(alike)
        if last.isdigit() and place is not None and _is_next(rows[place], last):
            rows[place] = replace(rows[place], count=rows[place].count + 1)
            left_out.append(layer.name)
            continue
        first[alike] = len(rows)
        rows.append(layer)
    return [replace(row, name=_range_of(row)) for row in rows]


def _is_next(row: Layer, number: str) -> bool:
    start = row.name.rpartition(".")[2]
    return start.isdigit() and int(start) + row.count == int(number)


def _range_of(row: Layer) -> str:
    parent, dot, last = row.name.rpartition(".")
    return row.name if row.count == 1 else f"{parent}{dot}{last}-{int(last) + row.count - 1}"
