"""The content of a `-m` line: its jobs, or a space to search."""

from dataclasses import dataclass
from typing import Any

from framework.config.folders import groups
from framework.config.hydra_settings import TO_HYDRA, is_hydras
from framework.config.overrides import is_choice, key_of, parse
from framework.runtime.problem import Problem, missing_extra
from framework.sweep.settings import PARAMS, Launcher, SubmititSlurm, read_settings
from framework.sweep.space import EXAMPLE, Condition, Dimension, Space, Values, conditional_key, split_condition, swept_values
from framework.sweep.sweeper import Sweeper


@dataclass(frozen=True)
class Multirun:
    """The parsed command line of a sweep."""

    fixed: list[str]  # the overrides that all jobs share
    space: Space
    launcher: Launcher
    sweeper: Sweeper | None  # None: all combinations of the values

    def line(self, values: Values) -> list[str]:
        """Return a job's command line.

        The launcher adds overrides that the line does not contain. If strategies are swept, `single` gets one process.
        """
        given = [_key_of(text) for text in self.fixed] + self.space.keys
        own = [text for text in self.launcher.overrides if _key_of(text) not in given]
        line = [*own, *self.fixed, *(f"{key}={value}" for key, value in values.items())]
        if values.get("parallel") == "single":
            line += [f"{key}=1" for key in _SIZES if key in map(_key_of, line) and key not in self.space.keys]
        return line

    @property
    def num_at_a_time(self) -> int:
        """The number of jobs at a time. A search uses earlier results: by default it does not fill a cluster."""
        most = self.launcher.num_at_a_time
        if self.sweeper is None:
            return most
        cluster = self.launcher.array_parallelism if isinstance(self.launcher, SubmititSlurm) else None
        return min(most, self.sweeper.n_jobs or cluster or _TRIALS_AT_A_TIME)

    @property
    def num_trials(self) -> int:
        """The number of trials of a search."""
        assert self.sweeper is not None
        return self.sweeper.num_trials(len(self.space.combinations()) if self.sweeper.is_grid else 0)


_TRIALS_AT_A_TIME = 4
_SIZES = ("launch.nnodes", "launch.nproc_per_node", "launch.slurm.gpus_per_node")


def _key_of(text: str) -> str:
    return text.partition("=")[0]


def read(overrides: list[str]) -> tuple[Multirun, list[Problem]]:
    """Parse a sweep's command line. This does not check its single values."""
    hydras = [text for text in overrides if _is_setting(text)]
    line = [text for text in overrides if text not in hydras]
    (launcher, sweeper, params), problems = read_settings(hydras, line)
    given = {_key_of(text).lstrip("+") for text in line}
    written = [f"{key}={values}" for key, values in params.items() if not given & {key, key.partition("@")[0]}]
    fixed, swept = _sorted([*line, *written])
    for key, condition in [key for key in swept if is_hydras(key[0]) or key[0] == "mode"]:
        problems.append(Problem(key, "cannot be swept", "one value for all jobs"))
        del swept[key, condition]
    if isinstance(launcher, SubmititSlurm) and any(text.startswith("launch=") and text != "launch=slurm" for text in fixed):
        problems.append(Problem("launch", "is not slurm, but hydra/launcher=submitit_slurm is", "one of the two"))
        launcher = Launcher()
    is_search = sweeper is not None or "hydra/sweeper=optuna" in hydras
    problems += missing_extra("hydra/sweeper", "search") if is_search else []
    if is_search and not swept:
        problems.append(Problem("hydra/sweeper", "optuna, but there is nothing to search", "as in " + EXAMPLE))
    dimensions = []
    for (key, condition), override in swept.items():
        try:
            draws = is_search and not (sweeper is not None and sweeper.is_grid)
            dimensions.append(Dimension(key, swept_values(override, draws=draws), condition))
        except ValueError as error:
            problems.append(Problem(conditional_key(key, condition), str(error), "as in " + EXAMPLE))
    space = Space(dimensions)
    if len(dimensions) == len(swept):
        problems += space.problems(fixed=[_key_of(text).lstrip("+") for text in fixed])
    for dimension in dimensions:
        for value in dimension.values if dimension.key in groups() and isinstance(dimension.values, list) else []:
            if read_settings(hydras, [*fixed, f"{dimension.key}={value}"])[0].params != params:
                problems.append(Problem(dimension.key, f"{value} defines its own sweep", "one such option, not swept"))
    return Multirun(fixed, space, launcher, sweeper), problems


def _is_setting(text: str) -> bool:
    """Return whether an override concerns the sweep, and not its jobs."""
    if text.startswith(PARAMS):
        return True
    override = parse(text)
    if override is None or override.is_sweep_override():
        return False
    return is_hydras(override.key_or_group) and not override.key_or_group.startswith(TO_HYDRA)


def _sorted(line: list[str]) -> tuple[list[str], dict[tuple[str, Condition | None], Any]]:
    """Split a line into the overrides that all jobs share and the swept keys. If a key is swept twice, the last one counts."""
    fixed: list[str] = []
    swept: dict[tuple[str, Condition | None], Any] = {}
    for text in line:
        plain, condition = split_condition(text)
        override = parse(plain)
        is_group = override is not None and is_choice(override)
        key = plain.partition("=")[0] if is_group else key_of(override) if override is not None else ""
        swept.pop((key, condition), None)
        if override is not None and (condition is not None or override.is_sweep_override()):
            swept[key, condition] = override
        else:
            fixed.append(text)
    return fixed, swept
