"""What a `-m` line asks for: its jobs, or a space to search, and how many jobs at a time."""

import itertools
from dataclasses import dataclass
from typing import Any

from framework.config.compose import swept_in_files
from framework.config.folders import options
from framework.config.overrides import is_hydras, parse
from framework.runtime.extras import missing_extra
from framework.runtime.problem import Problem
from framework.sweep.settings import Launcher, SubmititSlurm, Sweeper, read_settings

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
        """Return a job's command line.

        The launcher gives what the line itself does not say; one process is what `single` asks for among other strategies.
        """
        given = [_key_of(text) for text in self.fixed] + list(self.swept)
        own = [text for text in self.launcher.overrides if _key_of(text) not in given]
        line = [*own, *self.fixed, *(f"{key}={value}" for key, value in values.items())]
        if values.get("parallel") == "single":
            line += [f"{key}=1" for key in _SIZES if key in map(_key_of, line) and key not in self.swept]
        return line

    @property
    def num_at_a_time(self) -> int:
        """How many jobs run at a time. A search draws from results: it does not take all the room of a cluster unasked."""
        if self.sweeper is not None and isinstance(self.launcher, SubmititSlurm):
            return self.launcher.array_parallelism or _TRIALS_AT_A_TIME
        return self.launcher.num_at_a_time

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


_TRIALS_AT_A_TIME = 4
_SIZES = ("launch.nnodes", "launch.nproc_per_node", "launch.slurm.gpus_per_node")


def _key_of(text: str) -> str:
    return text.partition("=")[0]


def read(overrides: list[str]) -> tuple[Multirun, list[Problem]]:
    """Take a sweep's command line apart. Whether its single values are right is not asked here."""
    fixed: list[str] = []
    swept: dict[str, Any] = {}
    hydras: dict[str, Any] = {}
    given = {override.key_or_group for override in map(parse, overrides) if override is not None}
    written = [f"{key}={value}" for key, value in _written_down(overrides).items() if key not in given]
    for text in [*overrides, *written]:
        override = parse(text)
        key = override.key_or_group if override is not None else ""
        swept.pop(key, None)  # the last one counts
        if key.startswith(_PARAMS):
            continue
        if override is not None and override.is_sweep_override():
            swept[key] = override
        elif is_hydras(key):
            hydras[key] = override.value()  # type: ignore[union-attr]  # it has a key
        else:
            fixed.append(text)
    is_search = hydras.get("hydra/sweeper") == "optuna"
    launcher, sweeper, problems = read_settings(hydras)
    problems += [Problem(key, "cannot be swept", "one value for all jobs") for key in swept if is_hydras(key) or key == "mode"]
    if "mode=report" in fixed:
        what = "report is about all runs of a root, and -m about jobs"
        problems.append(Problem("mode", what, "without -m, with run.root alone"))
    if isinstance(launcher, SubmititSlurm) and any(text.startswith("launch=") and text != "launch=slurm" for text in fixed):
        problems.append(Problem("launch", "is not slurm, but hydra/launcher=submitit_slurm is", "one of the two"))
        launcher = Launcher()
    problems += missing_extra("hydra/sweeper", "search") if is_search else []
    if is_search and not swept:
        problems.append(Problem("hydra/sweeper", "optuna, but there is nothing to search", "as in " + _EXAMPLE))
    spaces: dict[str, list[str] | Interval] = {}
    for key, override in swept.items():
        try:
            is_numeric = override.is_interval_sweep() or override.is_range_sweep()
            spaces[key] = _interval(override) if is_search and is_numeric else _listed(override)
        except ValueError as error:
            problems.append(Problem(key, str(error), "as in " + _EXAMPLE))
    return Multirun(fixed, spaces, launcher, sweeper), problems


def _written_down(overrides: list[str]) -> dict[str, str]:
    """Return the sweep that a file or `hydra.sweeper.params.KEY=VALUES` writes down, as Hydra's users do."""
    found = swept_in_files([text for text in overrides if not text.startswith("hydra")])
    for text in overrides:
        key, _, values = text.lstrip("+").partition("=")
        if key.startswith(_PARAMS):
            found[key.removeprefix(_PARAMS)] = values
    return found


_PARAMS = "hydra.sweeper.params."
_EXAMPLE = '"optimizer.lr=tag(log, interval(1e-4, 1e-1))"'


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
