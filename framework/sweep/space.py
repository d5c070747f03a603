"""The space of a sweep: the swept keys, and the values of each, or for a search the distributions to draw from."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from framework.config.folders import options

Values = dict[str, str]  # one job's values of the swept keys, in command-line form
Space = Mapping[str, Any]  # the list of a key's values, or for a search a distribution of Optuna


def named_values(values: Any) -> list[str]:
    """Return the values of a key. For an interval, return its ends."""
    if isinstance(values, list):
        return values
    return [str(values.low), str(values.high)] if hasattr(values, "low") else list(values.choices)


def combinations(space: Space) -> list[Values]:
    """Return every combination of the listed values, in Hydra's order."""
    return [dict(zip(space, chosen)) for chosen in product(*map(named_values, space.values()))]


def samples(space: Space) -> list[Values]:
    """Return jobs that together have every value (the ends of an interval): the first values, then one change at a time."""
    first = {key: named_values(values)[0] for key, values in space.items()}
    return [first, *(first | {key: value} for key, values in space.items() for value in named_values(values)[1:])]


# --- the values in a line

EXAMPLE = '"optimizer.lr=tag(log, interval(1e-4, 1e-1))"'


def swept_values(override: Any, *, ends: bool = False) -> list[str]:
    """Return the listed values of an override, with `ends` also of an interval. Raise ValueError if there are none."""
    if override.is_interval_sweep():
        if ends:
            return [str(override.value().start), str(override.value().end)]
        raise ValueError("an interval has infinitely many values: hydra/sweeper=optuna draws from it")
    if hasattr(override.value(), "filter"):  # glob(...)
        values = override.value().filter(options(override.key_or_group))
    else:
        values = list(override.sweep_string_iterator())
    if not values:
        raise ValueError("no value is left to run")
    return values


def distribution(override: Any) -> Any:
    """Return Optuna's distribution from which a search draws a key's values. Raise ValueError if nothing can be drawn."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not (override.is_interval_sweep() or override.is_range_sweep()):
        return CategoricalDistribution(swept_values(override))
    space, log = override.value(), "log" in override.value().tags
    values = list(space.range()) if override.is_range_sweep() else [space.start, space.end]
    if not values or values[0] > values[-1]:
        raise ValueError("an interval or a range to search must increase")
    steps = {"step": space.step} if override.is_range_sweep() else {}
    kind = IntDistribution if all(isinstance(value, int) for value in values) else FloatDistribution
    return kind(values[0], values[-1], log=log, **steps)
