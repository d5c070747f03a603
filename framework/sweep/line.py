"""The content of a `-m` line: its jobs, or a space to search, and where and how many jobs run at a time."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ConfigDict

from framework.config.compose import launcher_and_sweeper
from framework.config.folders import groups, options
from framework.config.hydra_settings import is_hydras
from framework.config.identity import flat
from framework.config.overrides import is_choice, key_of, one_line, parse
from framework.config.schema import Positive, Section, keys_of
from framework.config.spelling import did_you_mean
from framework.config.validation import section_problems
from framework.runtime.problem import Problem, missing_extra, shown
from framework.sweep.space import EXAMPLE, Condition, Dimension, Space, Values, conditional_key, split_condition, swept_values
from framework.sweep.sweeper import Sweeper, read_pruner

# --- `hydra.launcher` and `hydra.sweeper`


class Launcher(Section):
    """The basic launcher: jobs run on this machine, one after another."""

    @property
    def num_at_a_time(self) -> int:
        return 1

    @property
    def overrides(self) -> list[str]:
        """The overrides that the launcher adds to a job if the job's line does not contain them."""
        return []


class Joblib(Launcher):
    n_jobs: int

    def rules(self) -> Iterator[Problem]:
        if self.n_jobs < 1 and self.n_jobs != -1:
            yield Problem("n_jobs", f"{self.n_jobs} is out of range", "at least 1, or -1 for one job for each CPU")

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
    """The launcher for jobs on a cluster. Its other keys become keys of `launch`, and the check of each job finds mistakes."""

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
_NEEDLESS = {  # submitit's keys without an effect here
    "name": "a job has the name of its run", "submitit_folder": "a job's output is in slurm/ of its run",
    "stderr_to_stdout": "it is always on", "max_num_timeout": "a job requeues itself as often as necessary",
    "gpus_per_task": "gpus_per_node, since one task of each node starts all processes",
}  # fmt: skip


_OPTIONS: dict[str, dict[str, type[Any]]] = {
    "launcher": {"basic": Launcher, "joblib": Joblib, "submitit_local": SubmititLocal, "submitit_slurm": SubmititSlurm},
    "sweeper": {"basic": Section, "optuna": Sweeper},
}


class Settings(NamedTuple):
    """The settings of `hydra.launcher` and `hydra.sweeper`."""

    launcher: Launcher = Launcher()
    sweeper: Sweeper | None = None
    params: dict[str, str] = {}  # the swept keys and their values

    @classmethod
    def read(cls, hydras: list[str], line: list[str]) -> tuple["Settings", list[Problem]]:
        """Read the files that a line chooses, and the overrides of Hydra's own keys such as `hydra.sweeper.n_trials=9`."""
        own = [text for text in hydras if not text.startswith(_PARAMS)]
        given = {override.key_or_group: override.value() for override in map(parse, own) if override is not None}
        given.pop("hydra.verbose", None)  # main() has read it
        problems = []
        for section in _OPTIONS:
            known = _options(section)
            if (name := given.pop(f"hydra/{section}", "basic")) not in known:
                expected = f"one of {', '.join(known)}; {did_you_mean(str(name), known)}".rstrip("; ")
                problems.append(Problem(f"hydra/{section}", f"no option {shown(name)}", expected))
        chosen = [text for text in hydras if text.startswith("hydra/")]
        try:
            found = {} if problems else launcher_and_sweeper([*line, *chosen])
        except Exception as error:  # a faulty file; if it is another file, the check of the jobs reports it
            found = {}
            with suppress(Exception):
                launcher_and_sweeper(line)
                problems.append(Problem(" ".join(chosen), one_line(error)))
        if not found:
            return cls(), problems
        for section, (name, node) in found.items():
            inner = node.get("params") if isinstance(node, dict) else None
            if not isinstance(node, dict) or not isinstance(inner, (dict, type(None))):
                problems.append(Problem(f"hydra/{section}", f"{name} has no keys, or params without keys", "KEY: VALUES"))
        if problems:
            return cls(), problems
        params = {key: str(value) for key, value in flat(found["sweeper"][1].pop("params", None) or {}).items()}
        params |= {_key_of(text.removeprefix(_PARAMS)): text.partition("=")[2] for text in hydras if text.startswith(_PARAMS)}
        nodes = {section: {} if name == "basic" else node for section, (name, node) in found.items()}
        for key, value in given.items():
            section, _, name = key.removeprefix("hydra.").partition(".")
            if section in _OPTIONS and not name:
                problems.append(Problem(key, f"{shown(value)} is not valid", f"its keys, as in {key}.KEY=VALUE"))
            elif section not in _OPTIONS:
                problems.append(Problem(key, "is a key of Hydra that does nothing here", "use run.root and run.dir"))
            elif found[section][0] == "basic":
                others = [option for option in _OPTIONS[section] if option != "basic"]
                problems.append(Problem(key, "unknown key", f"only with hydra/{section}={' or '.join(others)}"))
            else:
                nodes[section][name] = value
        kinds = {section: _kind(section, name, nodes[section]) for section, (name, _) in found.items()}
        if kinds["sweeper"] is Sweeper:
            problems += read_pruner(nodes["sweeper"])
        for section, kind in kinds.items():
            problems += section_problems(kind, nodes[section], f"hydra.{section}", keys_of(kind, f"hydra.{section}."))
        if problems:
            return cls(params=params), problems
        sweeper = kinds["sweeper"](**nodes["sweeper"])
        return cls(kinds["launcher"](**nodes["launcher"]), sweeper if isinstance(sweeper, Sweeper) else None, params), []


_PARAMS = "hydra.sweeper.params."


def _options(section: str) -> list[str]:
    """Return the options of `hydra/launcher` or `hydra/sweeper`, with the files conf/hydra/sweeper/NAME.yaml."""
    return list(dict.fromkeys([*_OPTIONS[section], *(options("hydra/sweeper") if section == "sweeper" else [])]))


def _kind(section: str, name: str, node: dict[str, Any]) -> type[Any]:
    return _OPTIONS[section].get(name, Sweeper if "n_trials" in node else Section)


# --- the line


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
        if self.sweeper is not None and isinstance(self.launcher, SubmititSlurm):
            return self.launcher.array_parallelism or _TRIALS_AT_A_TIME
        return self.launcher.num_at_a_time

    @property
    def num_trials(self) -> int:
        """The number of trials of a search."""
        assert self.sweeper is not None
        is_grid = self.sweeper.sampler == "grid"
        return self.sweeper.num_trials(len(self.space.combinations()) if is_grid else 0)


_TRIALS_AT_A_TIME = 4
_SIZES = ("launch.nnodes", "launch.nproc_per_node", "launch.slurm.gpus_per_node")


def _key_of(text: str) -> str:
    return text.partition("=")[0]


def read(overrides: list[str]) -> tuple[Multirun, list[Problem]]:
    """Parse a sweep's command line. This does not check its single values."""
    hydras = [text for text in overrides if _is_setting(text)]
    line = [text for text in overrides if text not in hydras]
    (launcher, sweeper, params), problems = Settings.read(hydras, line)
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
            draws = is_search and (sweeper is None or sweeper.sampler != "grid")
            dimensions.append(Dimension(key, swept_values(override, draws=draws), condition))
        except ValueError as error:
            problems.append(Problem(conditional_key(key, condition), str(error), "as in " + EXAMPLE))
    space = Space(dimensions)
    if len(dimensions) == len(swept):
        problems += space.problems(fixed=[_key_of(text).lstrip("+") for text in fixed])
    for dimension in dimensions:
        for value in dimension.values if dimension.key in groups() and isinstance(dimension.values, list) else []:
            if Settings.read(hydras, [*fixed, f"{dimension.key}={value}"])[0].params != params:
                problems.append(Problem(dimension.key, f"{value} defines its own sweep", "one such option, not swept"))
    return Multirun(fixed, space, launcher, sweeper), problems


def _is_setting(text: str) -> bool:
    """Return whether an override concerns the sweep, and not its jobs."""
    if text.startswith(_PARAMS):
        return True
    override = parse(text)
    return override is not None and is_hydras(override.key_or_group) and not override.is_sweep_override()


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
