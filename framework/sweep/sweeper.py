"""`hydra.sweeper` of a search: the number of trials, their draws and their pruning, by hydra-optuna-sweeper's keys."""

import warnings
from collections.abc import Iterator
from typing import Any

from framework.config.schema import Node, Positive, Section
from framework.config.targets import instantiated, locate, signature_of
from framework.config.validation import component_problems
from framework.runtime.problem import Problem

_LEFT_OUT = {  # these samplers would draw otherwise after a kill, or do not work here
    "CmaEsSampler": "keeps its state in a pickle",
    "GPSampler": "starts torch's threads in the process that forks the jobs",
    "QMCSampler": "counts its draws, also those of killed trials",
    "BruteForceSampler": "is what -m without hydra/sweeper=optuna does",
    "GridSampler": "is what -m without hydra/sweeper=optuna does",
}


class Sweeper(Section):
    """The settings of a search."""

    n_trials: Positive
    n_jobs: Positive | None
    study_name: str | None
    sampler: dict[str, Any]
    pruner: dict[str, Any]

    def rules(self) -> Iterator[Problem]:
        target = str(self.sampler.get("_target_"))
        if why := _LEFT_OUT.get(target.removeprefix("optuna.samplers.")):
            yield Problem("sampler", f"{target} {why}", "hydra/sweeper/sampler=tpe or random")
        elif not (found := list(_component_problems("sampler", self.sampler))) and "seed" not in signature_of(target).arguments:
            yield Problem("sampler", f"{target} has no argument seed", "one that draws the same from the same seed")
        else:
            yield from found
        least, most = self.pruner.get("min_resource", 1), self.pruner.get("max_resource")
        if isinstance(least, int) and isinstance(most, int) and most < least:  # Optuna finds it in the middle of a search
            yield Problem("pruner.max_resource", f"{most} is less than min_resource={least}", "at least that")
        yield from _component_problems("pruner", self.pruner)


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
