"""The differences between what one process and several processes have computed in the same steps."""

from typing import Any

from framework.preflight.two_steps import Seen, Sketch

_TOLERANCE = 1e-6  # in float64: a wrong computation differs by more than a thousandth, rounding by less than 1e-10


def difference(expected: Seen, ranks: list[Seen]) -> str:
    """Return the first difference, or an empty text."""
    gradients = [{name: sketch for rank in ranks[::-1] for name, sketch in rank.gradients[step].items()} for step in range(2)]
    weights = {name: sketch for rank in ranks[::-1] for name, sketch in rank.weights.items()}
    worst = ""
    for step in range(2):
        worst = worst or _other_sums(expected, ranks, step, where=f"step {step + 1}")
        worst = worst or far(expected.gradients[step], gradients[step], what=f"step {step + 1}: the gradient of")
    worst = worst or far(expected.weights, weights, what="after two steps:") or _kept_otherwise(expected, ranks)
    updated = {name: sketch for rank in ranks[::-1] for name, sketch in rank.updated.items()}
    worst = worst or far(expected.updated, updated, what=f"after {expected.num_updates} more updates by the same gradients:")
    worst = worst or _other_sums(expected, ranks, 2, where="an evaluation")
    buffers = {name: sketch for rank in ranks[::-1] for name, sketch in rank.buffers.items()}
    for name, sketch in expected.buffers.items():  # one by one: some are counts
        found = {name: buffers[name]} if name in buffers else {}
        worst = worst or far({name: sketch}, found, what="after two steps: the buffer", scale=expected.scales[name])
    if not worst:
        return ""
    for name, sketch in expected.outputs.items():
        for rank in ranks:
            if name in rank.outputs and not _distance(sketch, rank.outputs[name]) <= _TOLERANCE * max(sketch[0], 1e-12):
                return f"first in the output of {name or 'the model'}; {worst}"
    for name, sketch in expected.early.items():
        for rank in ranks:
            if name in rank.early and far({name: sketch}, {name: rank.early[name]}, what="", scale=expected.scales[name]):
                return f"first in the buffer {name}, in the first step; {worst}"
    return worst


def far(
    expected: dict[str, Sketch], actual: dict[str, Sketch], *, what: str, scale: float = 0.0, tolerance: float = _TOLERANCE
) -> str:
    """Return the tensor that differs most, if all tensors together differ by more than the rounding of a norm of `scale`."""
    if missing := expected.keys() ^ actual.keys():
        return f"{what} {min(missing)} exists on one side only"
    distances = {name: _distance(expected[name], actual[name]) for name in expected}
    norm = max(scale, 1e-12, sum(sketch[0] ** 2 for sketch in expected.values()) ** 0.5)
    if sum(distance**2 for distance in distances.values()) ** 0.5 <= tolerance * norm:
        return ""
    name = next(name for name in distances if not distances[name] <= tolerance * max(expected[name][0], 1e-12))
    return f"{what} {name} differs by {distances[name] / max(expected[name][0], 1e-12):.1e}"


def _other_sums(expected: Seen, ranks: list[Seen], number: int, *, where: str) -> str:
    for name, value in expected.sums[number].items():
        found = sum(rank.sums[number][name] for rank in ranks)
        if not abs(value - found) <= _TOLERANCE * max(1e-9, abs(value)):  # not a number is a difference too
            return f"{name} of {where} is {found:.6g} instead of {value:.6g}"
    return ""


def other_columns(expected: Seen, rank: Seen, *, but_not: Seen | None = None) -> str:
    """Return the first column of the parts that differs, but not one that differs also in `but_not`. Lists are not compared."""
    for number, columns in enumerate(expected.columns):
        for name in sorted(columns.keys() | rank.columns[number].keys()):
            if isinstance(columns.get(name), list):
                continue
            value, found = columns.get(name), rank.columns[number].get(name)
            if differ(found, value) and not (but_not is not None and differ(but_not.columns[number].get(name), value)):
                return f"the column {name} of step {number + 1} is {found} instead of {value}"
    return ""


def _kept_otherwise(expected: Seen, ranks: list[Seen]) -> str:
    for rank in ranks:
        for name, value in rank.kept.items():
            other = expected.kept.get(name)
            if differ(value, other):
                return f"the optimizer's {name} is {value} instead of {other}"
    return ""


def differ(one: Any, other: Any, *, tolerance: float = _TOLERANCE) -> bool:
    """Return whether two plain values differ by more than rounding."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) != len(other) or any(differ(*pair, tolerance=tolerance) for pair in zip(one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(differ(one[key], other[key], tolerance=tolerance) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) > tolerance * abs(other)
    return bool(one != other)


def _distance(one: Sketch, other: Sketch) -> float:
    return max(abs(one[0] - other[0]), abs(one[1] - other[1]))
