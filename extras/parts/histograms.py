"""Histograms of weights and gradients in the training rows; loggers that support histograms show them."""

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from framework.modules.parts import nearest_name
from framework.modules.tensors import gradient_of, whole
from framework.training.loop_view import Loop

Bins = list[Any]  # lowest value, highest value, counts in equal bins between them


class Histograms:
    """A part that adds `weight_histogram:NAME` and `gradient_histogram:NAME` to a training row, every `every` steps.

    They are for parameters with names that match a pattern; gradients are not clipped yet. A histogram is
    `[lowest, highest, [count, ...]]`, with `bins` counts. Values that are not finite are left out.
    """

    def __init__(self, *, every: int = 100, bins: int = 32, parameters: list[str]) -> None:
        for name, value in (("every", every), ("bins", bins)):
            if value < 1:
                raise ValueError(f"{name}={value} is out of range (at least 1)")
        self.every, self.bins, self.parameters = every, bins, parameters
        self._found: dict[str, Bins] = {}

    def begun(self, loop: Loop) -> None:
        names = {name for some in loop.distinct(sorted(loop.trained())) for name in some}
        if not any(self._is_chosen(name) for name in names):
            pattern = self.parameters[0] if self.parameters else ""
            raise ValueError(f"parameters={pattern}: matches no trained parameter ({nearest_name(pattern, sorted(names))})")

    def step_begun(self, loop: Loop) -> None:
        self._found = {}

    def gradients_ready(self, loop: Loop) -> None:
        if not loop.has_row or (loop.step + 1) % self.every:
            return
        mine: dict[str, Bins] = {}
        for name, parameter in loop.trained().items():
            if self._is_chosen(name):  # only one whole tensor at a time is in memory
                if (weights := f"weight_histogram:{name}") not in self._found:  # of an earlier turn: before the step
                    mine[weights] = self._histogram(whole(parameter.detach()))
                if (gradient := gradient_of(parameter)) is not None:
                    mine[f"gradient_histogram:{name}"] = self._histogram(whole(gradient.detach()))
        for found in loop.distinct(mine)[::-1]:
            self._found |= found

    def row(self, loop: Loop) -> dict[str, Bins]:
        return dict(sorted(self._found.items()))

    def _is_chosen(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.parameters)

    def _histogram(self, tensor: Tensor) -> Bins:
        values = tensor.flatten().to("cpu", torch.float64)
        values = values[values.isfinite()]
        if not values.numel():
            return [0.0, 0.0, [0] * self.bins]
        lowest, highest = values.min().item(), values.max().item()
        counts = torch.histc(values, bins=self.bins, min=lowest, max=highest)
        return [lowest, highest, [int(count) for count in counts]]
