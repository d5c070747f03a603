"""`hydra.launcher` and `hydra.sweeper`: where the jobs of a sweep run, how many at a time, and how a search draws them."""

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ConfigDict

from framework.config.compose import launcher_and_sweeper
from framework.config.folders import options
from framework.config.hydra_compose import composes
from framework.config.hydra_settings import is_hydras
from framework.config.identity import flat
from framework.config.overrides import one_line, parse, sort_overrides
from framework.config.schema import Positive, Section, keys_of
from framework.config.spelling import did_you_mean
from framework.config.validation import section_problems
from framework.runtime.problem import Problem, shown
from framework.sweep.sweeper import Sweeper

# --- launchers


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


class OtherLauncher(Launcher):
    """Another launcher of Hydra, which runs the jobs itself."""

    node: dict[str, Any]

    @property
    def num_at_a_time(self) -> int:
        return 1_000_000  # it decides


_LAUNCHERS: dict[str, type[Launcher]] = {  # by `_target_`: the plug-in whose keys they take
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher": Launcher,
    "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher": Joblib,
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher": SubmititLocal,
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher": SubmititSlurm,
}
_SWEEPERS: dict[str, type[Section]] = {
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper": Section,
    "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper": Sweeper,
}
_KINDS: dict[str, dict[str, type[Any]]] = {"launcher": _LAUNCHERS, "sweeper": _SWEEPERS}


# --- from the line and the files


class Settings(NamedTuple):
    """The settings of `hydra.launcher` and `hydra.sweeper`."""

    launcher: Launcher = Launcher()
    sweeper: Sweeper | None = None
    params: dict[str, str] = {}  # the swept keys and their values


PARAMS = "hydra.sweeper.params."


def read_settings(hydras: list[str], line: list[str]) -> tuple[Settings, list[Problem]]:
    """Read the files that a line chooses, and the overrides of Hydra's own keys such as `hydra.sweeper.n_trials=9`."""
    given = {one.key_or_group: one.value() for one in map(parse, hydras) if one and not one.key_or_group.startswith(PARAMS)}
    given = {key: value for key, value in given.items() if key != "hydra.verbose"}  # main() has read it
    nodes, problems = _nodes(hydras, line, {key: value for key, value in given.items() if "/" in key})
    if not nodes:
        return Settings(), problems
    params = {key: str(value) for key, value in flat(nodes["sweeper"].pop("params", None) or {}).items()}
    words = [text.removeprefix(PARAMS).partition("=") for text in hydras if text.startswith(PARAMS)]
    params |= {key: values for key, _, values in words}
    for key, value in given.items():
        section, _, name = key.removeprefix("hydra.").partition(".")
        if section not in _KINDS and "/" not in key:
            problems.append(Problem(key, "is a key of Hydra that does nothing here", "use run.root and run.dir"))
        elif section in _KINDS and not name:
            problems.append(Problem(key, f"{shown(value)} is not valid", f"its keys, as in {key}.KEY=VALUE"))
        elif key in ("hydra.sweeper.sampler", "hydra.sweeper.pruner") and not isinstance(value, dict):
            problems.append(Problem(key, f"{shown(value)} is not valid", f"hydra/sweeper/{name}={value}, or {key}.KEY=VALUE"))
        elif section in _KINDS:
            nodes[section] = _updated(nodes[section], name, value)
    found = {section: _section(section, node) for section, node in nodes.items()}
    problems += [problem for _, own in found.values() for problem in own]
    if problems:
        return Settings(params=params), problems
    sweeper = found["sweeper"][0]
    return Settings(found["launcher"][0], sweeper if isinstance(sweeper, Sweeper) else None, params), []


def _nodes(hydras: list[str], line: list[str], chosen: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Return the nodes of the launcher and the sweeper from the files, or the problems of the chosen options."""
    problems, line = [], [text for text in line if not is_hydras(parse_group(text))]
    for group, name in chosen.items():
        if name not in (known := _names_of(group)):
            expected = f"one of {', '.join(known)}; {did_you_mean(str(name), known)}".rstrip("; ")
            problems.append(Problem(group, f"no option {shown(name)}", expected))
    try:
        nodes = {} if problems else launcher_and_sweeper([*line, *(text for text in hydras if parse_group(text) in chosen)])
    except Exception as error:  # a faulty file; if it is another file, the check of the jobs reports it
        is_here = composes(sort_overrides(line)[0])
        return {}, [Problem(" ".join(f"{group}={name}" for group, name in chosen.items()), one_line(error))] if is_here else []
    for section, node in nodes.items():
        if not isinstance(node, dict) or not isinstance(node.get("params") or {}, dict):
            problems.append(Problem(f"hydra/{section}", "has no keys, or params without keys", "KEY: VALUES"))
    return {} if problems else nodes, problems


def _names_of(group: str) -> list[str]:
    """Return the options of a group, `basic` first, without the options of groups in the group."""
    basic = ["basic"] if group.count("/") == 1 else []
    return [*basic, *(name for name in options(group) if "/" not in name and name not in basic)]


def parse_group(text: str) -> str:
    """Return the key or group of an override's text."""
    return text.partition("=")[0].lstrip("+")


def _updated(node: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a node with a value at a dotted name. Keys are merged, as by Hydra."""
    first, dot, rest = name.partition(".")
    inner = node[first] if isinstance(node.get(first), dict) else {}
    if dot:
        value = _updated(inner, rest, value)
    elif isinstance(value, dict):
        value = inner | value
    return node | {first: value}


def _section(section: str, node: dict[str, Any]) -> tuple[Any, list[Problem]]:
    """Return the settings of a launcher or a sweeper, or their problems."""
    kinds = _KINDS[section]
    target = node.pop("_target_", None) or next(iter(kinds))
    if section == "launcher" and target not in kinds:
        from framework.sweep.hydra_pool import launcher_problems  # imported late: it imports all that runs a job

        node["_target_"] = target
        return OtherLauncher(node=node), launcher_problems(node)
    if (kind := kinds.get(target)) is None:
        return None, [Problem(f"hydra.{section}._target_", f"{shown(target)} is not known here", f"one of {', '.join(kinds)}")]
    node = {name: value for name, value in node.items() if value is not None or name in kind.model_fields}
    key, is_basic = f"hydra.{section}", target == next(iter(kinds))
    if is_basic and node:
        others = " or ".join(_names_of(f"hydra/{section}")[1:])
        return None, [Problem(f"{key}.{name}", "unknown key", f"only with hydra/{section}={others}") for name in node]
    problems = section_problems(kind, node, key, keys_of(kind, f"{key}."))
    return (None if problems else kind(**node)), problems
