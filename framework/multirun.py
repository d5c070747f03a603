"""What a `-m` line asks for: its jobs, or a space to search, and how many jobs at a time."""

import itertools
import os
from dataclasses import dataclass
from typing import Any

from framework.config import is_hydras, option_node, options, parse
from framework.problems import Problem, did_you_mean, shown
from framework.schema import Launcher, Sweeper, settings_problems

Values = dict[str, str]  # one job's values of the swept keys, as a command line writes them


@dataclass(frozen=True)
class Interval:
    """A range of numbers to draw from, its ends included; integers if both of them are."""

    low: int | float
    high: int | float
    step: int | float | None = None
    log: bool = False  # as many draws from each decade


@dataclass(frozen=True)
class Multirun:
    """A sweep's command line, taken apart."""

    fixed: list[str]  # the overrides that all jobs share
    swept: dict[str, list[str] | Interval]
    launcher: Launcher
    sweeper: Sweeper | None  # None: every combination of the values

    def line(self, values: Values) -> list[str]:
        """Return a job's command line."""
        return [*self.fixed, *(f"{key}={value}" for key, value in values.items())]

    def combinations(self) -> list[Values]:
        """Return every combination of the values that are listed, in Hydra's order."""
        listed = {key: space for key, space in self.swept.items() if not isinstance(space, Interval)}
        return [dict(zip(listed, values)) for values in itertools.product(*listed.values())]

    def samples(self) -> list[Values]:
        """Return jobs that together hold every value, of an interval its ends: first of all, then one changed at a time."""
        ends = {key: [str(space.low), str(space.high)] if isinstance(space, Interval) else space
                for key, space in self.swept.items()}  # fmt: skip
        first = {key: values[0] for key, values in ends.items()}
        return [first, *(first | {key: value} for key, values in ends.items() for value in values[1:])]

    @property
    def num_at_a_time(self) -> int:
        return self.launcher.n_jobs if self.launcher.n_jobs > 0 else len(os.sched_getaffinity(0))


def read(overrides: list[str]) -> tuple[Multirun, list[Problem]]:
    """Take a sweep's command line apart. Whether its single values are right is not asked here."""
    fixed: list[str] = []
    swept: dict[str, Any] = {}
    hydras: dict[str, Any] = {}
    for text in overrides:
        override = parse(text)
        key = override.key_or_group if override is not None else ""
        swept.pop(key, None)  # the last one counts
        if override is not None and override.is_sweep_override():
            swept[key] = override
        elif is_hydras(key):
            hydras[key] = override.value()  # type: ignore[union-attr]  # it has a key
        else:
            fixed.append(text)
    is_search = hydras.get("hydra/sweeper") == "optuna"
    launcher, sweeper, problems = _settings(hydras)
    problems += [Problem(key, "cannot be swept", "one value for all jobs") for key in swept if is_hydras(key) or key == "mode"]
    if is_search and not swept:
        problems.append(Problem("hydra/sweeper", "optuna, but there is nothing to search", "as in " + _EXAMPLE))
    spaces: dict[str, list[str] | Interval] = {}
    for key, override in swept.items():
        try:
            spaces[key] = _interval(override) if is_search and _is_numeric(override) else _listed(override)
        except ValueError as error:
            problems.append(Problem(key, str(error), "as in " + _EXAMPLE))
    return Multirun(fixed, spaces, launcher, sweeper), problems


_EXAMPLE = '"optimizer.lr=tag(log, interval(1e-4, 1e-1))"'


def _is_numeric(override: Any) -> bool:
    return override.is_interval_sweep() or override.is_range_sweep()


def _listed(override: Any) -> list[str]:
    """Return the values of a sweep that lists them. ValueError if it does not, or there is none."""
    if override.is_interval_sweep():
        raise ValueError("an interval has no end of values: hydra/sweeper=optuna searches it")
    if hasattr(override.value(), "filter"):  # glob(...)
        values = override.value().filter(options(override.key_or_group))
    else:
        values = list(override.sweep_string_iterator())
    if not values:
        raise ValueError("no value is left to run")
    return values


def _interval(override: Any) -> Interval:
    """Return what a search draws from. ValueError if nothing can be drawn."""
    space, log = override.value(), "log" in override.value().tags
    if override.is_range_sweep():
        values = list(space.range())
        if not values or space.step <= 0 or log:
            raise ValueError("a range to search goes up and holds a value; tag(log, ...) is for an interval")
        return Interval(values[0], values[-1], step=space.step)
    if not space.start < space.end or (log and space.start <= 0):
        raise ValueError("an interval to search goes up" + (", with tag(log, ...) from above 0" if log else ""))
    return Interval(space.start, space.end, log=log)


_OPTIONS = {"hydra/launcher": ("basic", "joblib"), "hydra/sweeper": ("basic", "optuna")}


def _settings(hydras: dict[str, Any]) -> tuple[Launcher, Sweeper | None, list[Problem]]:
    """Read the overrides of Hydra's own keys: `hydra/sweeper=optuna`, `hydra.sweeper.n_trials=9`."""
    problems = []
    nodes: dict[str, dict[str, Any]] = {}
    for group, names in _OPTIONS.items():
        chosen = hydras.pop(group, "basic")
        if chosen not in names:
            close = did_you_mean(str(chosen), names)
            problems.append(Problem(group, f"no option {shown(chosen)}", f"one of {', '.join(names)}" + (f"; {close}" if close else "")))
            chosen = names[1]
        nodes[group] = option_node(group, names[1]) if chosen == names[1] else {}
    for key, value in hydras.items():
        section, _, name = key.removeprefix("hydra.").partition(".")
        group = f"hydra/{section}"
        if group not in _OPTIONS or not name:
            problems.append(Problem(key, "is Hydra's own and does nothing here", "run.root and run.dir say where runs go"))
        elif not nodes[group]:
            problems.append(Problem(key, "unknown key", f"only with {group}={_OPTIONS[group][1]}"))
        else:
            nodes[group][name] = value
    launcher, sweeper = nodes["hydra/launcher"] or {"n_jobs": 1}, nodes["hydra/sweeper"]
    problems += settings_problems(Launcher, launcher, prefix="hydra.launcher.")
    if launcher["n_jobs"] == 0:
        problems.append(Problem("hydra.launcher.n_jobs", "0 is out of range", "at least 1, or -1 for one each CPU"))
    problems += settings_problems(Sweeper, sweeper, prefix="hydra.sweeper.") if sweeper else []
    if problems:
        return Launcher(n_jobs=1), None, problems
    return Launcher(**launcher), Sweeper(**sweeper) if sweeper else None, []
