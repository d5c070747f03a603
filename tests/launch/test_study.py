"""TrialDraws follow from the seed, the number and the trials before, whatever the sampler; conditions, pruners; what is refused."""

import json
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from optuna.pruners import PercentilePruner
from optuna.trial import Trial, TrialState

from framework.config.overrides import parse
from framework.runs.directory import RunDirectory
from framework.runtime.problem import Problem
from framework.sweep.line import Multirun, read
from framework.sweep.search import Watched
from framework.sweep.space import Values
from framework.sweep.study import TrialDraws, open_study
from framework.sweep.sweeper import Objective, built_quietly
from tests.harness import Says

OPTUNA = "hydra/sweeper=optuna"
# a learning rate for all, and keys that one model has
SPACE = [
    "optimizer.lr=tag(log,interval(1e-4,1e-1))",
    "trainer.clip_grad_norm=interval(0.1,2)",
    "model=mlp,cnn",
    "model.dim@mlp=8,16",
    "optimizer.weight_decay@model:cnn=interval(0,1)",
]


def line_of(*words: str) -> Multirun:
    line, problems = read([OPTUNA, *words])
    assert not problems, problems
    return line


class Trials:
    """A search without its runs: the objective is a formula."""

    def __init__(self, *words: str, directory: Path) -> None:
        self.line = line_of(*words)
        assert self.line.sweeper is not None
        self.goals = self.line.sweeper.goals or [Objective("val/loss", "min")]
        self.study = open_study(directory / "search.db", name="search", goals=self.goals)
        self.draws = TrialDraws(self.study, self.line.sweeper, self.line.space)

    def drawn(self, num: int) -> list[Values]:
        """Go on until there are `num` trials, with the one that was interrupted first. Returns the values of all."""
        for frozen in self.study.get_trials(states=(TrialState.RUNNING,)):
            self._run(Trial(self.study, frozen._trial_id))
        while len(self.study.trials) < num:
            self._run(self.study.ask())
        return [{name: str(value) for name, value in trial.params.items()} for trial in self.study.trials]

    def _run(self, trial: Trial) -> None:
        values = self.draws.values(trial)
        loss = abs(math.log10(float(values["optimizer.lr"])) + 2.5) + (values["model"] == "mlp")
        self.study.tell(trial, [loss, *([1.0] * (len(self.goals) - 1))])


SAMPLERS = {
    "tpe": [],
    "several": ["hydra.sweeper.objectives=[val/loss:min,parameters:min]"],
    "random": ["hydra/sweeper/sampler=random"],
    "nsga": ["hydra.sweeper.sampler={_target_:optuna.samplers.NSGAIISampler,population_size:3}"],
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("words", SAMPLERS.values(), ids=SAMPLERS)
def test_a_search_that_was_killed_between_two_keys_draws_the_same(words: list[str], tmp_path: Path) -> None:
    words = [*SPACE, *words]
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = Trials(*words, directory=tmp_path / "whole").drawn(14)
    assert len({tuple(values.values()) for values in whole}) > 10
    for number in (3, 12):  # before TPE has learnt anything, and after
        killed = Trials(*words, directory=tmp_path / "killed")
        killed.drawn(number)
        trial = killed.study.ask()
        with pytest.raises(KeyboardInterrupt):
            killed.draws._space.choose(_stopping_at(killed, trial, 1))
    assert Trials(*words, directory=tmp_path / "killed").drawn(14) == whole


def _stopping_at(trials: Trials, trial: Trial, number: int) -> Callable[[Any], str]:
    drawn = count()
    original = trials.draws._draw
    trials.draws._draw = lambda trial, dimension: _or_stop(original, trial, dimension, next(drawn) == number)  # type: ignore[method-assign]
    return lambda _: trials.draws.values(trial)["model"]


def _or_stop(original: Callable[..., str], trial: Trial, dimension: Any, stops: bool) -> str:
    if stops:
        raise KeyboardInterrupt
    return original(trial, dimension)


def test_a_grid_is_every_combination_once_in_order(tmp_path: Path) -> None:
    words = ["optimizer.lr=0.1,0.01", "model=mlp,cnn", "model.dim@mlp=range(1,4)", "hydra/sweeper/sampler=grid"]
    line = line_of(*words)
    assert line.num_trials == 8 and line_of(*words, "hydra.sweeper.n_trials=3").num_trials == 3
    drawn = Trials(*words, directory=tmp_path).drawn(8)
    names = [{one.key: values[one.name] for one in line.space.dimensions if one.name in values} for values in drawn]
    assert names == line.space.combinations()


# --- conditions


def test_a_key_with_a_condition_is_in_the_jobs_with_that_option() -> None:
    line, problems = read(
        ["model=mlp,cnn", "model.dim@mlp=8,16", "seed=0,1", "model.norm@cnn=batch", "optimizer.lr@model:cnn=0.1,0.2"]
    )
    assert not problems and line.fixed == []
    combinations = line.space.combinations()
    assert [line.line(values) for values in combinations if values["seed"] == "0"] == [
        ["model=mlp", "seed=0", "model.dim=8"],
        ["model=mlp", "seed=0", "model.dim=16"],
        ["model=cnn", "seed=0", "model.norm=batch", "optimizer.lr=0.1"],
        ["model=cnn", "seed=0", "model.norm=batch", "optimizer.lr=0.2"],
    ]
    assert len(combinations) == 8
    samples = line.space.samples()
    assert all(values in combinations for values in samples) and len(samples) == 5  # every value, and what goes with it


def test_each_model_may_have_its_own_values_of_one_key() -> None:
    line, problems = read(["model=mlp,vit", "model.dim@mlp=8", "model.dim@vit=64,128"])
    assert not problems and line.space.keys == ["model", "model.dim"]
    assert [list(values.values()) for values in line.space.combinations()] == [["mlp", "8"], ["vit", "64"], ["vit", "128"]]


# --- pruners

EVALUATIONS = [5, 10, 15, 20, 25, 30]


def verdict(trials: Trials, losses: list[float], directory: Path, *, kill_at: int | None = None) -> int | None:
    """Return the step at which the next trial, which has these losses, is given up; the search is killed after a step."""
    trial = trials.study.ask()
    directory.mkdir()
    (directory / "metrics.jsonl").touch()

    def watched() -> Watched:
        assert trials.line.sweeper is not None
        again = Trial(trials.study, trial._trial_id)
        return Watched(again, RunDirectory(directory), monitor="val/loss", pruner=trials.line.sweeper.chosen_pruner)

    watch = watched()
    for step, loss in zip(EVALUATIONS, losses):
        with open(directory / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "split": "val", "loss": loss}) + "\n")
        is_hopeless = watch.is_hopeless()
        if step == kill_at:
            watch = watched()
        assert watch.is_hopeless() == is_hopeless
        if is_hopeless:
            trials.study.tell(trial, state=TrialState.PRUNED)
            return step
    trials.study.tell(trial, losses[-1])
    return None


GOOD, BAD, STUCK = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [2.0, 1.9, 1.8, 1.7, 1.6, 1.5], [0.9, 0.3, 0.31, 0.31, 0.31, 0.31]
PRUNED = [  # a line, and the steps at which three trials are given up: good, bad, stuck
    ("none", [None, None, None]),
    ("median n_startup_trials=1", [None, 5, None]),
    ("asha min_resource=10 reduction_factor=2", [None, 10, None]),
    ("hyperband min_resource=15 max_resource=18 reduction_factor=2", [None, 15, None]),
    ("patient patience=3", [None, None, 30]),
]


@pytest.mark.parametrize(("words", "steps"), PRUNED, ids=[words for words, _ in PRUNED])
@pytest.mark.parametrize("kill_at", [None, 10])
def test_a_pruner_stops_what_its_parameters_say_also_when_the_search_was_killed(
    words: str, steps: list[int | None], kill_at: int | None, tmp_path: Path
) -> None:
    name, *parameters = words.split()
    line = [f"hydra/sweeper/pruner={name}", *(f"hydra.sweeper.pruner.{text}" for text in parameters)]
    trials = Trials(*SPACE, *line, directory=tmp_path)
    found = [verdict(trials, losses, tmp_path / str(n), kill_at=kill_at) for n, losses in enumerate((GOOD, BAD, STUCK))]
    assert found == steps


def test_a_pruner_of_optuna_is_built_by_its_target() -> None:
    line = line_of(
        *SPACE,
        "hydra.sweeper.pruner={_target_:optuna.pruners.PercentilePruner,percentile:10}",
        "hydra.sweeper.pruner.n_warmup_steps=7",
    )
    assert line.sweeper is not None
    built = built_quietly(line.sweeper.chosen_pruner)
    assert isinstance(built, PercentilePruner) and (built._percentile, built._n_warmup_steps) == (10, 7)


# --- what is refused

NOT_SEARCHED = [
    (
        "hydra/sweeper/pruner=asha hydra.sweeper.pruner.percentile=9",
        "hydra.sweeper.pruner.percentile: unknown key ... min_resource",
    ),
    ("hydra.sweeper.pruner=none", "hydra.sweeper.pruner: ... hydra/sweeper/pruner=none"),
    ("hydra/sweeper/pruner=ashe", "hydra/sweeper/pruner: no option 'ashe' ... median ... mean asha?"),
    ("hydra/sweeper/pruner=patient", "hydra.sweeper.pruner.patience: is missing"),
    (
        "hydra/sweeper/pruner=hyperband hydra.sweeper.pruner.min_resource=9 hydra.sweeper.pruner.max_resource=8",
        "hydra.sweeper.pruner.max_resource: 8 ... min_resource=9",
    ),
    ("hydra/sweeper/sampler=cmaes", "hydra/sweeper/sampler: no option 'cmaes' ... grid, random, tpe"),
    (
        "hydra.sweeper.sampler._target_=optuna.samplers.CmaEsSampler",
        "hydra.sweeper.sampler: optuna.samplers.CmaEsSampler ... tpe",
    ),
    ("hydra.sweeper.sampler._target_=optuna.samplers.TPESmpler", "hydra.sweeper.sampler._target_: ... TPESampler"),
    ("hydra/sweeper/sampler=grid", "optimizer.lr: an interval ... sampler=tpe"),
    ("hydra.sweeper.objectives=[val/loss:min]", "hydra.sweeper.objectives: ... at least two"),
    ("hydra.sweeper.objectives=[val/loss:min,val/accuracy]", "hydra.sweeper.objectives: val/accuracy ... :max"),
    (
        "hydra.sweeper.objectives=[val/loss:min,parameters:min] hydra/sweeper/pruner=asha",
        "hydra.sweeper.pruner: ... several objectives ... pruner=none",
    ),
    ("hydra.sweeper.storage=journal", "hydra.sweeper.storage: unknown key ... search.db"),
    ("hydra.sweeper._target_=hydra_plugins.hydra_ax_sweeper.ax_sweeper.AxSweeper", "hydra.sweeper._target_: ... OptunaSweeper"),
    ("hydra.sweeper.search_space=3", "hydra.sweeper.search_space: unknown key ... hydra.sweeper.params"),
]


@pytest.mark.parametrize(("words", "problem"), NOT_SEARCHED)
def test_a_mistake_about_a_search_is_named(words: str, problem: str) -> None:
    assert all(parse(word) for word in words.split())
    told = [str(found) for found in read([OPTUNA, *SPACE, *words.split()])[1]]
    assert told[0] == Says(problem), told


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("model=mlp,cnn model.dim@vit=3,4", "model.dim@vit: ... model=vit (one of mlp, cnn)"),
        ("model=mlp model.dim@mlp=3,4", "model.dim@mlp: model is not swept ... model=mlp,ANOTHER"),
        ("model=mlp,cnn model.dim@mlp=3,4 model.dim=5", "model.dim@mlp: model.dim is also given without a condition"),
        (
            "model=mlp,cnn optimizer=sgd,adam model.dim@mlp=3 model.dim@optimizer:sgd=4",
            "model.dim@optimizer:sgd: depends ... model",
        ),
        ("model=mlp,cnn model.dim@mlp=interval(1,2)", "model.dim@mlp: an interval has infinitely many values"),
    ],
)
def test_a_condition_with_a_mistake_is_named(words: str, problem: str) -> None:
    assert list(map(str, read(words.split())[1])) == [Says(problem)]


def test_a_key_that_one_option_lacks_names_its_condition() -> None:
    line, _ = read(["model=mlp,cnn", "model.dim=8,16"])
    told = line.space.explained(Problem("model.dim", "unknown key", "model has channels"))
    assert str(told) == Says("model.dim: unknown key ... model.dim@OPTION=... mlp, cnn")
