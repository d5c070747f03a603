"""`hydra.sweeper` of a search: the number of trials, their draws, their pruning, and their objectives."""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from framework.config.schema import Node, Positive, Section
from framework.config.targets import instantiated, locate, signature_of
from framework.config.validation import component_problems
from framework.runs.metrics_file import MACHINE
from framework.runtime.problem import Problem, missing_extra, shown

_NUM_TRIALS = 20

# --- objectives


class Objective(NamedTuple):
    """An objective of a search: SPLIT/METRIC, or a number in the run's summary."""

    name: str
    mode: str  # min or max

    def value(self, summary: dict[str, Any], *, monitor: str) -> float | None:
        """Return the value of a run, or None.

        For the monitored split, it is the value at the evaluation with the best `monitor`. For another split, it is the last
        value.
        """
        split, slash, metric = self.name.partition("/")
        if not slash:
            found = summary.get(self.name)
        else:
            which = "best" if split == monitor.partition("/")[0] else "last"
            found = summary.get("metrics", {}).get(split, {}).get(which, {}).get(metric)
        return float(found) if isinstance(found, (int, float)) else None


_OF_SUMMARY = ("parameters", "wall_s")
_SPLITS = ("train", "val")


# --- the section

_GRID, _NONE, _MEDIAN = "optuna.samplers.GridSampler", "optuna.pruners.NopPruner", "optuna.pruners.MedianPruner"
_LEFT_OUT = {  # these samplers would draw otherwise after a kill, or do not work here
    "CmaEsSampler": "keeps its state in a pickle",
    "GPSampler": "starts torch's threads in the process that forks the jobs",
    "QMCSampler": "counts its draws, also those of killed trials",
    "BruteForceSampler": "ends a search itself; hydra/sweeper/sampler=grid does the same",
}


class Sweeper(Section):
    """The settings of a search: how it draws its trials. The keys are those of hydra-optuna-sweeper, and `objectives`."""

    n_trials: Positive | None
    n_jobs: Positive | None
    study_name: str | None
    direction: str | list[str] | None
    sampler: dict[str, Any]
    pruner: dict[str, Any] | None
    objectives: list[str] | None

    @property
    def is_grid(self) -> bool:
        """Whether the search is every combination of the values, in order."""
        return bool(self.sampler.get("_target_") == _GRID)

    @property
    def chosen_pruner(self) -> Node:
        """The pruner. The default is the median with one objective, and no pruner with several."""
        return self.pruner or {"_target_": _NONE if self.objectives else _MEDIAN}

    @property
    def goals(self) -> list[Objective]:
        """The objectives, if there are several."""
        return [Objective(name, mode) for name, _, mode in (text.rpartition(":") for text in self.objectives or [])]

    @property
    def metrics(self) -> list[str]:
        """The objectives that are metrics. The others come from the summary or from a clock."""
        return [goal.name for goal in self.goals if "/" in goal.name and goal.name.partition("/")[2] not in MACHINE]

    def num_trials(self, num_combinations: int) -> int:
        """Return the number of trials. `num_combinations` is the number of combinations in a grid."""
        if self.is_grid:
            return min(self.n_trials or num_combinations, num_combinations)
        return self.n_trials or _NUM_TRIALS

    def decisive(self) -> dict[str, Any]:
        """Return the settings that distinguish this search from other searches."""
        given = {"sampler": self.sampler, "pruner": self.chosen_pruner}
        return given | {"objectives": self.objectives, "study_name": self.study_name}

    def rules(self) -> Iterator[Problem]:
        yield from self._objective_problems()
        if missing_extra("sampler", "search"):  # the check of the line names it
            return
        yield from self._sampler_problems()
        pruner = self.chosen_pruner
        least, most = pruner.get("min_resource", 1), pruner.get("max_resource")
        if isinstance(least, int) and isinstance(most, int) and most < least:  # Optuna finds it in the middle of a search
            yield Problem("pruner.max_resource", f"{most} is less than min_resource={least}", "at least that")
        if self.objectives and pruner.get("_target_") != _NONE:
            yield Problem("pruner", "cannot compare several objectives", "hydra/sweeper/pruner=none")
        yield from _component_problems("pruner", pruner)

    def _sampler_problems(self) -> Iterator[Problem]:
        target = str(self.sampler.get("_target_"))
        if why := _LEFT_OUT.get(target.removeprefix("optuna.samplers.")):
            yield Problem("sampler", f"{target} {why}", "hydra/sweeper/sampler=tpe, random or grid")
        elif self.is_grid:  # the swept keys are its search_space
            yield from component_problems("sampler", {**self.sampler, "_partial_": True}, known=[])
        elif not (found := list(_component_problems("sampler", self.sampler))) and "seed" not in signature_of(target).arguments:
            yield Problem("sampler", f"{target} has no argument seed", "one that draws the same from the same seed")
        else:
            yield from found

    def direction_problems(self, mode: str) -> Iterator[Problem]:
        """Yield a problem if `direction` is not the direction in which the search goes. `mode` is the monitor's."""
        modes = [goal.mode for goal in self.goals] or [mode]
        given = self.direction if isinstance(self.direction, list) else [self.direction]
        if self.direction is not None and given != (real := [{"min": "minimize", "max": "maximize"}[one] for one in modes]):
            what = f"{shown(self.direction)}, but the search has {', '.join(real)}"
            expected = "set checkpoint.monitor and checkpoint.mode, or hydra.sweeper.objectives"
            yield Problem("hydra.sweeper.direction", what, expected)

    def _objective_problems(self) -> Iterator[Problem]:
        if self.objectives is None:
            return
        names = [goal.name for goal in self.goals]
        if len(names) < 2 or len({*names}) < len(names):
            yield Problem("objectives", f"{shown(self.objectives)} is not valid",
                          "at least two different objectives; for one, use checkpoint.monitor")  # fmt: skip
        for text, (name, mode) in zip(self.objectives, self.goals):
            split, slash, metric = name.partition("/")
            is_known = split in _SPLITS and metric if slash else name in _OF_SUMMARY
            if not is_known or mode not in ("min", "max"):
                expected = f"val/METRIC:min, val/METRIC:max, train/..., or {', '.join(_OF_SUMMARY)} with :min or :max"
                yield Problem("objectives", f"{text} is not valid", expected)


def _component_problems(key: str, node: Node) -> Iterator[Problem]:
    """Yield the problems of a sampler or a pruner. This builds it."""
    if not (problems := component_problems(key, node, known=[])):
        try:
            built_quietly(node)
        except Exception as error:  # the constructor of any class
            problems = [Problem.of_error(key, error)]
    yield from problems


def built_quietly(node: Node) -> Any:
    """Build one of Optuna's objects. Some of them warn that they are experimental."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=locate("optuna.exceptions.ExperimentalWarning"))  # type: ignore[arg-type]
        return instantiated(node)
