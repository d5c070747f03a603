"""The space of a sweep: the swept keys, their values, and the options with which a key is swept."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from framework.config.folders import is_group, options
from framework.runtime.problem import Problem

Values = dict[str, str]  # one job's values of the swept keys, in command-line form


@dataclass(frozen=True)
class Interval:
    """An interval of numbers to draw from, with both ends. It has integers if both ends are integers."""

    low: int | float
    high: int | float
    step: int | float | None = None
    log: bool = False  # each decade gets the same number of draws


class Condition(NamedTuple):
    """The option with which a key is swept, as in `model.dim@mlp=32,64`."""

    group: str
    option: str

    def holds(self, values: Values) -> bool:
        return values.get(self.group) == self.option


def split_condition(text: str) -> tuple[str, Condition | None]:
    """Split `KEY@OPTION=VALUES` into `KEY=VALUES` and the condition. `KEY@GROUP:OPTION` names an option of another group."""
    left, equals, values = text.partition("=")
    key, at, where = left.partition("@")
    if not (equals and at) or (is_group(key.lstrip("+")) and ":" not in where):  # GROUP@PACKAGE, as in Hydra
        return text, None
    group, _, option = where.rpartition(":")
    return f"{key}={values}", Condition(group or key.lstrip("+").split(".")[0], option)


@dataclass(frozen=True)
class Dimension:
    """A swept key with its values. Only jobs that satisfy the condition have the key."""

    key: str
    values: list[str] | Interval
    condition: Condition | None = None

    @property
    def name(self) -> str:
        """The key with its condition, in command-line form."""
        return conditional_key(self.key, self.condition)

    @property
    def listed(self) -> list[str]:
        """The values. For an interval, its ends."""
        return [str(self.values.low), str(self.values.high)] if isinstance(self.values, Interval) else self.values

    def applies(self, values: Values) -> bool:
        return self.condition is None or self.condition.holds(values)


def conditional_key(key: str, condition: Condition | None) -> str:
    if condition is None:
        return key
    is_own = condition.group == key.split(".")[0]
    return f"{key}@{condition.option}" if is_own else f"{key}@{condition.group}:{condition.option}"


class Space:
    """The dimensions of a sweep. Dimensions without a condition come first."""

    def __init__(self, dimensions: Sequence[Dimension]) -> None:
        self.dimensions = sorted(dimensions, key=lambda dimension: dimension.condition is not None)

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(dimension.key for dimension in self.dimensions))

    def choose(self, value_of: Callable[[Dimension], str]) -> Values:
        """Return a job's values. `value_of` returns each value; it is called in order, for the dimensions that apply."""
        values: Values = {}
        for dimension in self.dimensions:
            if dimension.applies(values):
                values[dimension.key] = value_of(dimension)
        return values

    def combinations(self) -> list[Values]:
        """Return every combination of the listed values, in Hydra's order."""
        found: list[Values] = [{}]
        for dimension in self.dimensions:
            found = [one | {dimension.key: value} if dimension.applies(one) else one
                     for one in found for value in (dimension.listed if dimension.applies(one) else [""])]  # fmt: skip
        return found

    def samples(self) -> list[Values]:
        """Return jobs that together have every value (the ends of an interval): the first values, then one change at a time."""
        found = [self._sample({})]
        for dimension in self.dimensions:
            for value in dimension.listed:
                found.append(self._sample({dimension.name: value} | dict([dimension.condition] if dimension.condition else [])))
        return [values for number, values in enumerate(found) if values not in found[:number]]

    def _sample(self, chosen: dict[str, str]) -> Values:
        return self.choose(lambda dimension: chosen.get(dimension.name, dimension.listed[0]))

    def explained(self, problem: Problem) -> Problem:
        """Return a problem of a job. Add the remedy if only some of the group's swept options have the key."""
        group, dot, _ = problem.key.partition(".")
        options = next((one.listed for one in self.dimensions if dot and one.key == group), [])
        if problem.what != "unknown key" or problem.key not in self.keys or len(options) < 2:
            return problem
        return replace(problem, expected=f"{problem.expected}; {problem.key}@OPTION=... is for one of {', '.join(options)}")

    def problems(self, *, fixed: Sequence[str]) -> Iterator[Problem]:
        """Yield the problems of the conditions. `fixed` are the keys that all jobs share."""
        free = {dimension.key: dimension.listed for dimension in self.dimensions if dimension.condition is None}
        groups: dict[str, str] = {}
        for dimension in self.dimensions:
            if (condition := dimension.condition) is None:
                continue
            if condition.group not in free:
                example = f"{condition.group}={condition.option},ANOTHER; or {dimension.key} without @"
                yield Problem(dimension.name, f"{condition.group} is not swept without a condition", f"as in {example}")
            elif condition.option not in free[condition.group]:
                what = f"no job has {condition.group}={condition.option}"
                yield Problem(dimension.name, what, f"one of {', '.join(free[condition.group])}")
            if dimension.key in (*free, *fixed):
                yield Problem(dimension.name, f"{dimension.key} is also given without a condition", "one of the two")
            elif groups.setdefault(dimension.key, condition.group) != condition.group:
                yield Problem(dimension.name, f"depends on {condition.group} and on {groups[dimension.key]}", "one of the two")


# --- the values in a line

EXAMPLE = '"optimizer.lr=tag(log, interval(1e-4, 1e-1))"'


def swept_values(override: Any, *, draws: bool) -> list[str] | Interval:
    """Return the values of an override: a list, or an interval for draws. Raise ValueError if there are none."""
    is_numeric = override.is_interval_sweep() or override.is_range_sweep()
    return _interval(override) if draws and is_numeric else _listed(override)


def _listed(override: Any) -> list[str]:
    """Return the listed values of a sweep. Raise ValueError if it lists no values, or if no value remains."""
    if override.is_interval_sweep():
        raise ValueError("an interval has infinitely many values: hydra/sweeper=optuna draws from it, with sampler=tpe, random")
    if not override.is_sweep_override():  # one value with a condition
        return [override.get_value_element_as_str()]
    if hasattr(override.value(), "filter"):  # glob(...)
        values = override.value().filter(options(override.key_or_group))
    else:
        values = list(override.sweep_string_iterator())
    if not values:
        raise ValueError("no value is left to run")
    return values


def _interval(override: Any) -> Interval:
    """Return the interval from which a search draws. Raise ValueError if nothing can be drawn."""
    space, log = override.value(), "log" in override.value().tags
    if override.is_range_sweep():
        values = list(space.range())
        if not values or space.step <= 0 or log:
            raise ValueError("a range to search must increase and have a value; tag(log, ...) is for an interval")
        return Interval(values[0], values[-1], step=space.step)
    if not space.start < space.end or (log and space.start <= 0):
        raise ValueError("an interval to search must increase" + (", with tag(log, ...) from above 0" if log else ""))
    return Interval(space.start, space.end, log=log)
