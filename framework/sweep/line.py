"""What a `-m` line asks for: its jobs, or a space to search, and where and how many jobs run at a time."""

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict

from framework.config.compose import launcher_and_sweeper
from framework.config.folders import groups, options
from framework.config.identity import flat
from framework.config.overrides import is_hydras, key_of, parse
from framework.config.schema import Count, Positive, Section, keys_of
from framework.config.spelling import did_you_mean
from framework.config.validation import section_problems
from framework.runtime.problem import Problem, missing_extra, shown

Values = dict[str, str]  # one job's values of the swept keys, as a command line writes them

# --- `hydra.launcher` and `hydra.sweeper`


class Launcher(Section):
    """Jobs run here, one after another."""

    @property
    def num_at_a_time(self) -> int:
        return 1

    @property
    def overrides(self) -> list[str]:
        """The overrides that the launcher adds to every job whose line does not have them."""
        return []


class Joblib(Launcher):
    n_jobs: int

    def rules(self) -> Iterator[Problem]:
        if self.n_jobs < 1 and self.n_jobs != -1:
            yield Problem("n_jobs", f"{self.n_jobs} is out of range", "at least 1, or -1 for one each CPU")

    @property
    def num_at_a_time(self) -> int:
        return self.n_jobs if self.n_jobs > 0 else len(os.sched_getaffinity(0))


class SubmititLocal(Launcher):
    cpus_per_task: Positive
    tasks_per_node: Positive

    @property
    def num_at_a_time(self) -> int:
        return max(1, len(os.sched_getaffinity(0)) // (self.cpus_per_task * self.tasks_per_node))

    @property
    def overrides(self) -> list[str]:
        return [f"launch.nproc_per_node={self.tasks_per_node}"]


class SubmititSlurm(Launcher):
    """Jobs run on the cluster. The launcher's other keys become keys of `launch`, where each job's check finds mistakes."""

    model_config = ConfigDict(extra="allow")
    array_parallelism: Positive | None

    def rules(self) -> Iterator[Problem]:
        for name in _NEEDLESS.keys() & (self.model_extra or {}).keys():
            yield Problem(name, "does nothing here", _NEEDLESS[name])

    @property
    def num_at_a_time(self) -> int:
        return 1_000_000  # all jobs may wait in Slurm's queue

    @property
    def overrides(self) -> list[str]:
        extra = dict(self.model_extra or {})
        others = extra.pop("additional_parameters", None) or {}
        values = {_IN_LAUNCH.get(name, f"slurm.{name}"): value for name, value in extra.items()}
        values |= {f"slurm.options.{name}": value for name, value in others.items()}
        values["slurm.array_parallelism"] = self.array_parallelism
        return ["launch=slurm", *(f"launch.{key}={json.dumps(value)}" for key, value in values.items() if value is not None)]


_OF_SBATCH = ("gres", "cpus_per_gpu", "mem_per_gpu", "mem_per_cpu", "comment", "exclusive", "nodelist", "dependency",
              "mail_type", "mail_user")  # fmt: skip
_IN_LAUNCH = {  # the keys of `launch` for submitit's keys; submitit's other keys have the same name in `launch.slurm`
    "nodes": "nnodes", "tasks_per_node": "nproc_per_node", "timeout_min": "slurm.time_min", "signal_delay_s": "slurm.signal_s",
    "srun_args": "slurm.srun", **{name: f"slurm.options.{name}" for name in _OF_SBATCH},
}  # fmt: skip
_NEEDLESS = {  # of submitit's
    "name": "a job's name is its run's", "submitit_folder": "a job's output is in its run's slurm/",
    "stderr_to_stdout": "it always is", "max_num_timeout": "a job requeues itself as often as it takes",
    "gpus_per_task": "gpus_per_node, since one task of each node starts all processes",
}  # fmt: skip


class Sweeper(Section):
    """How a search draws its trials."""

    n_trials: Positive
    seed: Count
    sampler: Literal["tpe", "random"]
    pruner: Literal["median", "none"]


_OPTIONS: dict[str, dict[str, type[Any]]] = {
    "launcher": {"basic": Launcher, "joblib": Joblib, "submitit_local": SubmititLocal, "submitit_slurm": SubmititSlurm},
    "sweeper": {"basic": Section, "optuna": Sweeper},
}


class Settings(NamedTuple):
    """What `hydra.launcher` and `hydra.sweeper` say."""

    launcher: Launcher = Launcher()
    sweeper: Sweeper | None = None
    params: dict[str, str] = {}  # swept keys and their values

    @classmethod
    def read(cls, hydras: list[str], line: list[str]) -> tuple["Settings", list[Problem]]:
        """Read the files that a line chooses, and overrides of Hydra's own keys such as `hydra.sweeper.n_trials=9`."""
        given = {override.key_or_group: override.value() for override in map(parse, hydras) if override is not None}
        given.pop("hydra.verbose", None)  # main() has read it
        problems = []
        for section, known in _OPTIONS.items():
            if (name := given.pop(f"hydra/{section}", "basic")) not in known:
                expected = f"one of {', '.join(known)}; {did_you_mean(str(name), list(known))}".rstrip("; ")
                problems.append(Problem(f"hydra/{section}", f"no option {shown(name)}", expected))
        try:
            found = {} if problems else launcher_and_sweeper([*line, *(text for text in hydras if text.startswith("hydra/"))])
        except Exception:  # a faulty file: the check of the jobs reports it
            found = {}
        if not found:
            return cls(), problems
        params = {key: str(value) for key, value in flat(found["sweeper"][1].pop("params", None) or {}).items()}
        nodes = {section: {} if name == "basic" else node for section, (name, node) in found.items()}
        for key, value in given.items():
            section, _, name = key.removeprefix("hydra.").partition(".")
            if key.startswith(_PARAMS):
                params[key.removeprefix(_PARAMS)] = next(t.partition("=")[2] for t in hydras[::-1] if t.startswith(f"{key}="))
            elif section in _OPTIONS and not name:
                problems.append(Problem(key, f"{shown(value)} is not valid", f"its keys, as in {key}.KEY=VALUE"))
            elif section not in _OPTIONS:
                problems.append(Problem(key, "is Hydra's own and does nothing here", "run.root and run.dir say where runs go"))
            elif found[section][0] == "basic":
                others = [option for option in _OPTIONS[section] if option != "basic"]
                problems.append(Problem(key, "unknown key", f"only with hydra/{section}={' or '.join(others)}"))
            else:
                nodes[section][name] = value
        kinds = {section: _OPTIONS[section][name] for section, (name, _) in found.items()}
        for section, kind in kinds.items():
            problems += section_problems(kind, nodes[section], f"hydra.{section}", keys_of(kind, f"hydra.{section}."))
        if problems:
            return cls(params=params), problems
        sweeper = kinds["sweeper"](**nodes["sweeper"])
        return cls(kinds["launcher"](**nodes["launcher"]), sweeper if isinstance(sweeper, Sweeper) else None, params), []


_PARAMS = "hydra.sweeper.params."


# --- the line


@dataclass(frozen=True)
class Interval:
    """A range of numbers to draw from, its ends included; integers if both of them are."""

    low: int | float
    high: int | float
    step: int | float | None = None
    log: bool = False  # equally many draws from each decade


@dataclass(frozen=True)
class Multirun:
    """A sweep's command line, parsed."""

    fixed: list[str]  # the overrides that all jobs share
    swept: dict[str, list[str] | Interval]
    launcher: Launcher
    sweeper: Sweeper | None  # None: every combination of the values

    def line(self, values: Values) -> list[str]:
        """Return a job's command line.

        The launcher adds overrides that the line does not have; among other strategies `single` gets one process.
        """
        given = [_key_of(text) for text in self.fixed] + list(self.swept)
        own = [text for text in self.launcher.overrides if _key_of(text) not in given]
        line = [*own, *self.fixed, *(f"{key}={value}" for key, value in values.items())]
        if values.get("parallel") == "single":
            line += [f"{key}=1" for key in _SIZES if key in map(_key_of, line) and key not in self.swept]
        return line

    @property
    def num_at_a_time(self) -> int:
        """How many jobs run at a time. A search draws from results: by default it does not fill a cluster."""
        if self.sweeper is not None and isinstance(self.launcher, SubmititSlurm):
            return self.launcher.array_parallelism or _TRIALS_AT_A_TIME
        return self.launcher.num_at_a_time

    def combinations(self) -> list[Values]:
        """Return every combination of the listed values, in Hydra's order."""
        listed = {key: space for key, space in self.swept.items() if not isinstance(space, Interval)}
        return [dict(zip(listed, values)) for values in itertools.product(*listed.values())]

    def samples(self) -> list[Values]:
        """Return jobs that together have every value (of an interval its ends): the first values, then one change at a time."""
        ends = {key: [str(space.low), str(space.high)] if isinstance(space, Interval) else space
                for key, space in self.swept.items()}  # fmt: skip
        first = {key: values[0] for key, values in ends.items()}
        return [first, *(first | {key: value} for key, values in ends.items() for value in values[1:])]


_TRIALS_AT_A_TIME = 4
_SIZES = ("launch.nnodes", "launch.nproc_per_node", "launch.slurm.gpus_per_node")


def _key_of(text: str) -> str:
    return text.partition("=")[0]


def read(overrides: list[str]) -> tuple[Multirun, list[Problem]]:
    """Parse a sweep's command line. Its single values are not checked here."""
    fixed: list[str] = []
    swept: dict[str, Any] = {}
    hydras = [text for text in overrides if (override := parse(text)) is not None and is_hydras(override.key_or_group)
              and (text.startswith(_PARAMS) or not override.is_sweep_override())]  # fmt: skip
    line = [text for text in overrides if text not in hydras]
    (launcher, sweeper, params), problems = Settings.read(hydras, line)
    given = {_key_of(text).lstrip("+") for text in line}
    for text in [*line, *(f"{key}={values}" for key, values in params.items() if key not in given)]:
        override = parse(text)
        key = key_of(override) if override is not None else ""
        swept.pop(key, None)  # the last one counts
        if override is not None and override.is_sweep_override():
            swept[key] = override
        else:
            fixed.append(text)
    is_search = sweeper is not None or "hydra/sweeper=optuna" in hydras
    for key in [key for key in swept if is_hydras(key) or key == "mode"]:
        problems.append(Problem(key, "cannot be swept", "one value for all jobs"))
        del swept[key]
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
    for key, values in spaces.items():
        for value in values if key in groups() and isinstance(values, list) else []:
            if Settings.read(hydras, [*fixed, f"{key}={value}"])[0].params != params:
                problems.append(Problem(key, f"{value} defines a sweep of its own", "one such option, not swept"))
    return Multirun(fixed, spaces, launcher, sweeper), problems


_EXAMPLE = '"optimizer.lr=tag(log, interval(1e-4, 1e-1))"'


def _listed(override: Any) -> list[str]:
    """Return the listed values of a sweep. ValueError if it does not list values, or none is left."""
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
    """Return the interval that a search draws from. ValueError if nothing can be drawn."""
    space, log = override.value(), "log" in override.value().tags
    if override.is_range_sweep():
        values = list(space.range())
        if not values or space.step <= 0 or log:
            raise ValueError("a range to search goes up and holds a value; tag(log, ...) is for an interval")
        return Interval(values[0], values[-1], step=space.step)
    if not space.start < space.end or (log and space.start <= 0):
        raise ValueError("an interval to search goes up" + (", with tag(log, ...) from above 0" if log else ""))
    return Interval(space.start, space.end, log=log)
