"""The settings of a sweep: where and how many jobs run at a time (`hydra.launcher`), how a search draws (`hydra.sweeper`)."""

import json
import os
from typing import Annotated, Any, Literal

from pydantic import Field

from framework.config.folders import option_node
from framework.config.schema import AboveZero, Count, Positive, Section
from framework.config.spelling import did_you_mean
from framework.config.validation import settings_problems
from framework.runtime.problem import Problem, shown


class Launcher(Section):
    """Here, one after another."""

    @property
    def num_at_a_time(self) -> int:
        return 1

    @property
    def overrides(self) -> list[str]:
        """What the launcher gives to every job whose line does not say it."""
        return []


class Joblib(Launcher):
    n_jobs: Annotated[int, Field(ge=-1)]

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
    partition: str | None
    timeout_min: Positive | None
    nodes: Positive
    tasks_per_node: Positive | None
    gpus_per_node: Positive | None
    cpus_per_task: Positive | None
    mem_gb: AboveZero | None
    account: str | None
    qos: str | None
    constraint: str | None
    exclude: str | None
    setup: list[str]
    signal_delay_s: Positive
    array_parallelism: Positive | None

    @property
    def num_at_a_time(self) -> int:
        return self.array_parallelism or _MANY

    @property
    def overrides(self) -> list[str]:
        ours = {"nodes": "nnodes", "tasks_per_node": "nproc_per_node", "timeout_min": "slurm.time_min",
                "signal_delay_s": "slurm.signal_s"}  # fmt: skip
        values = self.model_dump(exclude={"array_parallelism"}, exclude_none=True)
        given = [f"launch.{ours.get(name, f'slurm.{name}')}={json.dumps(value)}" for name, value in values.items()]
        return ["launch=slurm", *given]


class Sweeper(Section):
    """How a search draws its trials."""

    n_trials: Positive
    seed: Count
    sampler: Literal["tpe", "random"]
    pruner: Literal["median", "none"]
    params: dict[str, str] | None = None  # the sweep, where a file writes it down


_MANY = 1_000_000  # jobs that may wait in Slurm's queue
_LAUNCHERS: dict[str, type[Launcher]] = {
    "basic": Launcher, "joblib": Joblib, "submitit_local": SubmititLocal, "submitit_slurm": SubmititSlurm,
}  # fmt: skip
_OPTIONS: dict[str, dict[str, Any]] = {"launcher": _LAUNCHERS, "sweeper": {"basic": None, "optuna": Sweeper}}


def read_settings(hydras: dict[str, Any]) -> tuple[Launcher, Sweeper | None, list[Problem]]:
    """Read the overrides of Hydra's own keys: `hydra/sweeper=optuna`, `hydra.sweeper.n_trials=9`."""
    problems = []
    nodes: dict[str, dict[str, Any]] = {}
    chosen: dict[str, str] = {}
    for section, known in _OPTIONS.items():
        name = chosen[section] = str(hydras.pop(f"hydra/{section}", "basic"))
        if name not in known:
            close = did_you_mean(name, list(known))
            problems.append(Problem(f"hydra/{section}", f"no option {shown(name)}",
                                    f"one of {', '.join(known)}" + (f"; {close}" if close else "")))  # fmt: skip
        nodes[section] = option_node(f"hydra/{section}", name) if name in known and name != "basic" else {}
    if problems:
        return Launcher(), None, problems
    for key, value in hydras.items():
        section, _, name = key.removeprefix("hydra.").partition(".")
        if section not in _OPTIONS or not name:
            problems.append(Problem(key, "is Hydra's own and does nothing here", "run.root and run.dir say where runs go"))
        elif chosen[section] == "basic":
            others = [option for option in _OPTIONS[section] if option != "basic"]
            problems.append(Problem(key, "unknown key", f"only with hydra/{section}={' or '.join(others)}"))
        else:
            nodes[section][name] = value
    launcher, sweeper = _LAUNCHERS[chosen["launcher"]], Sweeper if chosen["sweeper"] == "optuna" else None
    if (count := nodes["launcher"].get("n_jobs")) in (0, -2):
        what = f"{count} is out of range"
        problems.append(Problem("hydra.launcher.n_jobs", what, "at least 1, or -1 for one each CPU"))
    problems += settings_problems(launcher, nodes["launcher"], prefix="hydra.launcher.")
    problems += settings_problems(sweeper, nodes["sweeper"], prefix="hydra.sweeper.") if sweeper else []
    if problems:
        return Launcher(), None, problems
    return launcher(**nodes["launcher"]), sweeper(**nodes["sweeper"]) if sweeper else None, []
