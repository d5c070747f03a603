"""A table of a model: its modules, their output shapes, parameters and operations."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from framework.modules.tensors import Tree, call, first_tensor
from framework.modules.trace import on_meta

_DEPTH = 3  # of names: deeper modules are counted with the module that holds them


@dataclass(frozen=True)
class Layer:
    """A module, or several consecutive modules of one kind. The numbers are for one of them."""

    name: str
    kind: str
    count: int
    shape: str  # of its output
    parameters: int
    trained: int
    flops: int | None  # of a forward pass for one sample; a multiply-add counts as two; None if not known


def summary(model: nn.Module, *, example: Tree | None) -> list[dict[str, Any]]:
    """Return the model's modules with parameters, outer modules first, as plain data; the first is the model itself.

    `example` has the inputs of two samples. If it is None, or the model reads numbers, shapes and operations are not known.
    """
    shapes, flops = ({}, {}) if example is None else _of_forward(model, example)
    layers: list[Layer] = []
    for name, module in model.named_modules():
        parameters = list(nn.Module.parameters(module))
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
    except Exception:  # a user's model may read numbers, not only shapes
        return {}, {}
    root = type(copied).__name__
    counts = {path: sum(of_path.values()) // 2 for path, of_path in counter.get_flop_counts().items()}
    return shapes, {path.removeprefix(root).lstrip("."): count for path, count in counts.items() if path.startswith(root)}


def _joined(layers: list[Layer]) -> list[Layer]:
    """Join consecutive modules with names that differ only in a number; of the modules inside, keep those of the first."""
    rows: list[Layer] = []
    left_out: list[str] = []
    first: dict[tuple[str, ...], int] = {}  # rows that may stand for several modules
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
