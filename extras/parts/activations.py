"""Activations by module, in the training rows: their root mean square, and the share of zeros."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from framework.modules.parts import nearest_name
from framework.modules.tensors import first_tensor, local
from framework.training.loop_view import Loop


class Activations:
    """A part that adds `activation_rms:MODULE` and `activation_zeros:MODULE` to each training row.

    They are for the outputs (of several tensors, the first) of modules with a name that matches a pattern. They count the whole
    global batch and all forward passes of the step.
    """

    def __init__(self, *, modules: list[str]) -> None:
        self.modules = modules
        self._sums: dict[str, Tensor] = {}  # the sums of squares, of zeros and of elements
        self._is_on = False

    def begun(self, loop: Loop) -> None:
        everything = dict(loop.module.named_modules())
        named = {name: part for name, part in everything.items() if any(fnmatchcase(name, p) for p in self.modules)}
        if "" not in self.modules:  # the model itself, which no rank of a pipeline calls
            named.pop("", None)
        if not loop.any(bool(named)):
            pattern = self.modules[0] if self.modules else ""
            raise ValueError(f"modules={pattern}: matches no module ({nearest_name(pattern, [*everything])})")
        for name, part in named.items():
            part.register_forward_hook(self._hook(name, loop))

    def _hook(self, name: str, loop: Loop) -> Callable[[nn.Module, Any, Any], None]:
        def note(part: nn.Module, _: Any, output: Any) -> None:
            counts = self._is_on and part.training and not loop.is_padding
            returned = first_tensor(output) if counts else None
            if returned is not None and returned.is_floating_point():
                values = local(returned.detach()).double()
                seen = [values.square().sum(), (values == 0).sum().double(), values.new_tensor(float(values.numel()))]
                self._sums[name] = self._sums.get(name, 0.0) + torch.stack(seen).cpu()

        return note

    def step_begun(self, loop: Loop) -> None:
        self._sums, self._is_on = {}, loop.has_row

    def row(self, loop: Loop) -> dict[str, float]:
        names = sorted({name for some in loop.distinct(sorted(self._sums)) for name in some})
        nothing = torch.zeros(3, dtype=torch.float64)
        sums, self._sums = [self._sums.get(name, nothing) for name in names], {}
        if not names:
            raise ValueError(f"modules={','.join(self.modules)}: none of them returns a tensor of floating-point numbers")
        columns = {}
        for name, (squares, zeros, count) in zip(names, loop.sum(torch.stack(sums))):
            columns[f"activation_rms:{name}"] = float((squares / count).sqrt())
            columns[f"activation_zeros:{name}"] = float(zeros / count)
        return columns
