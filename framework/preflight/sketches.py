"""Sketches of tensors: two numbers that distinguish tensors, and comparisons of such numbers."""

import math

import torch
from torch import Tensor, nn

from framework.modules.tensors import whole
from framework.preflight.differences import real

_SAMPLED = 1 << 16  # numbers of a tensor
_INFINITE = 1e3  # what an infinite number counts as, for example of a mask
TOLERANCE = 1e-6  # in float64: a wrong computation differs by more than a thousandth, rounding by less than 1e-10

Sketch = tuple[float, float]  # of a tensor: its norm, and a projection


def sketch(tensor: Tensor) -> Sketch:
    """Return two numbers that distinguish tensors: the norm, and the product with a fixed vector without a period."""
    flat = real(whole(tensor.detach())).reshape(-1).double().nan_to_num(math.nan, _INFINITE, -_INFINITE)
    ramp = torch.arange(flat.numel(), dtype=torch.float64)
    product = flat * torch.sin(ramp * ramp % 1000.0 + ramp)
    return float(flat.norm()), float(product.sum())  # a dot product of MKL rounds as its threads are free


def sketches(module: nn.Module) -> dict[str, Sketch]:
    """Return sketches of a module's parameters and buffers; for large tensors, of some of their numbers."""
    tensors = {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    plain = {name: tensor for name, tensor in tensors.items() if tensor.layout == torch.strided and not tensor.is_meta}
    return {name: sketch(tensor.reshape(-1)[:: -(-tensor.numel() // _SAMPLED) or 1]) for name, tensor in plain.items()}


def far(
    expected: dict[str, Sketch], actual: dict[str, Sketch], *, what: str, scale: float = 0.0, tolerance: float = TOLERANCE
) -> str:
    """Return the tensor that differs most, if all tensors together differ by more than the rounding of a norm of `scale`."""
    if missing := expected.keys() ^ actual.keys():
        return f"{what} {min(missing)} exists on one side only"
    distances = {name: distance(expected[name], actual[name]) for name in expected}
    norm = max(scale, 1e-12, sum(sketch[0] ** 2 for sketch in expected.values()) ** 0.5)
    if sum(distance**2 for distance in distances.values()) ** 0.5 <= tolerance * norm:
        return ""
    name = next(name for name in distances if not distances[name] <= tolerance * max(expected[name][0], 1e-12))
    return f"{what} {name} differs by {distances[name] / max(expected[name][0], 1e-12):.1e}"


def other_sketch(ours: dict[str, Sketch], theirs: dict[str, Sketch]) -> str:
    """Return the name of the first tensor that differs by more than rounding; or an empty text. (`repr`: nan equals nan.)"""
    for name in (name for name in {**ours, **theirs} if repr(ours.get(name)) != repr(theirs.get(name))):
        if not (name in ours and name in theirs) or far({name: ours[name]}, {name: theirs[name]}, what=""):
            return name
    return ""


def distance(one: Sketch, other: Sketch) -> float:
    return max(abs(one[0] - other[0]), abs(one[1] - other[1]))
