"""Draws follow from the seed, the number and the trials before, whatever the sampler; pruners; files of searches; what is refused."""

import csv
import json
import math
from pathlib import Path

import pytest
import yaml
from optuna.pruners import PercentilePruner
from optuna.trial import FrozenTrial, Trial, TrialState

from framework.config.overrides import parse
from framework.config.trainer import CheckpointSection
from framework.runs.directory import RunDirectory
from framework.sweep.line import Multirun, read
from framework.sweep.search import Search, Watched
from framework.sweep.sweeper import built_quietly
from tests.harness import Says, typed

OPTUNA = "hydra/sweeper=optuna"
SPACE = ["optimizer.lr=tag(log,interval(1e-4,1e-1))", "trainer.clip_grad_norm=interval(0.1,2)", "model=mlp,cnn"]


def line_of(*words: str) -> Multirun:
    line, problems = read([OPTUNA, *words])
    assert not problems, problems
    return line


def search_of(*words: str, directory: Path) -> Search:
    """A search, without its runs."""
    directory.mkdir(exist_ok=True)
    return Search(line_of(*words), saving=CheckpointSection(), place=directory / "search.db")


def drawn(search: Search, num: int, *, size: int = 1) -> list[dict[str, object]]:
    """Go on until `num` trials have a result, which is a formula, in batches of `size`. Return the values of all."""
    while sum(trial.state.is_finished() for trial in search.trials()) < num:
        for trial in search.batch(size):
            search.study.tell(trial.number, loss(trial))
    return [trial.params for trial in search.trials()]


def loss(trial: FrozenTrial) -> float:
    return abs(math.log10(trial.params["optimizer.lr"]) + 2.5) + (trial.params["model"] == "mlp")


SAMPLERS = {
    "tpe": [],
    "random": ["hydra/sweeper/sampler=random"],
    "nsga": ["hydra.sweeper.sampler={_target_:optuna.samplers.NSGAIISampler,population_size:3}"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "sampler"), [(4, "tpe"), (1, "random"), (4, "nsga"), (1, "tpe"), (4, "random"), (1, "nsga")])
def test_a_search_that_was_killed_in_a_batch_draws_the_same(size: int, sampler: str, tmp_path: Path) -> None:
    words = SAMPLERS[sampler]
    whole = drawn(search_of(*SPACE, *words, directory=tmp_path / "whole"), 16, size=size)
    assert len({tuple(values.values()) for values in whole}) > 10
    for number in (0, 12):  # before TPE has learnt anything, and after
        killed = search_of(*SPACE, *words, directory=tmp_path / "killed")
        drawn(killed, number, size=size)
        batch = killed.batch(size)
        for trial in batch[: size // 2]:
            killed.study.tell(trial.number, loss(trial))
    again = search_of(*SPACE, *words, directory=tmp_path / "killed")
    assert [trial.number for trial in again.batch(size)] == [trial.number for trial in batch[size // 2 :]]
    assert drawn(again, 16, size=size) == whole


# --- pruners

EVALUATIONS = [5, 10, 15, 20, 25, 30]


def verdict(
    search: Search, losses: list[float], directory: Path, pruner: dict[str, object], *, kill_at: int | None
) -> int | None:
    """Return the step at which the next trial, which has these losses, is given up; the search is killed after a step."""
    (drawn,) = search.batch(1)
    directory.mkdir()

    def watched() -> Watched:
        return Watched(Trial(search.study, drawn._trial_id), RunDirectory(directory), monitor="val/loss", pruner=pruner)

    watch = watched()
    for step, loss in zip(EVALUATIONS, losses):
        with open(directory / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "split": "val", "loss": loss}) + "\n")
        if watch.is_hopeless():
            assert search.trials()[drawn.number].state == TrialState.PRUNED
            return step
        if step == kill_at:
            watch = watched()
            assert not watch.is_hopeless()
    search.study.tell(drawn.number, losses[-1])
    return None


GOOD, BAD, STUCK = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [2.0, 1.9, 1.8, 1.7, 1.6, 1.5], [0.9, 0.3, 0.31, 0.31, 0.31, 0.31]
PRUNED = [  # a line, and the steps at which three trials are given up: good, bad, stuck
    ("none", [None, None, None]),
    ("median n_startup_trials=1", [None, 5, None]),
    ("asha min_resource=10 reduction_factor=2", [None, 10, None]),
    ("hyperband min_resource=15 max_resource=18 reduction_factor=2", [None, 15, None]),
    ("patient patience=3", [None, None, 30]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "steps"), PRUNED, ids=[words for words, _ in PRUNED])
@pytest.mark.parametrize("kill_at", [10, pytest.param(None, marks=pytest.mark.slow)])
def test_a_pruner_stops_what_its_parameters_say_also_when_the_search_was_killed(
    words: str, steps: list[int | None], kill_at: int | None, tmp_path: Path
) -> None:
    name, *parameters = words.split()
    line = [*SPACE, f"hydra/sweeper/pruner={name}", *(f"hydra.sweeper.pruner.{text}" for text in parameters)]
    search, sweeper = search_of(*line, directory=tmp_path), line_of(*line).sweeper
    assert sweeper is not None
    found = [
        verdict(search, losses, tmp_path / str(n), sweeper.pruner, kill_at=kill_at)
        for n, losses in enumerate((GOOD, BAD, STUCK))
    ]
    assert found == steps


def test_a_pruner_of_optuna_is_built_by_its_target() -> None:
    target = "hydra.sweeper.pruner={_target_:optuna.pruners.PercentilePruner,percentile:10}"
    line = line_of(*SPACE, target, "hydra.sweeper.pruner.n_warmup_steps=7")
    assert line.sweeper is not None
    built = built_quietly(line.sweeper.pruner)
    assert isinstance(built, PercentilePruner) and (built._percentile, built._n_warmup_steps) == (10, 7)


# --- what is refused

NOT_SEARCHED = [
    ("hydra/sweeper/pruner=asha hydra.sweeper.pruner.percentile=9", "hydra.sweeper.pruner.percentile: unknown key ... min_resource"),
    ("hydra.sweeper.pruner=none", "hydra.sweeper.pruner: ... hydra/sweeper/pruner=none"),
    ("hydra/sweeper/pruner=ashe", "hydra/sweeper/pruner: no option 'ashe' ... median ... mean asha?"),
    ("hydra/sweeper/pruner=patient", "hydra.sweeper.pruner.patience: is missing"),
    ("hydra/sweeper/pruner=hyperband hydra.sweeper.pruner.min_resource=9 hydra.sweeper.pruner.max_resource=8",
     "hydra.sweeper.pruner.max_resource: 8 ... min_resource=9"),
    ("hydra/sweeper/sampler=cmaes", "hydra/sweeper/sampler: no option 'cmaes' ... random, tpe"),
    ("hydra.sweeper.sampler._target_=optuna.samplers.CmaEsSampler", "hydra.sweeper.sampler: optuna.samplers.CmaEsSampler ... tpe"),
    ("hydra.sweeper.sampler._target_=optuna.samplers.TPESmpler", "hydra.sweeper.sampler._target_: ... TPESampler"),
    ("hydra.sweeper.sampler._target_=optuna.samplers.GridSampler", "hydra.sweeper.sampler: ... -m without hydra/sweeper=optuna"),
    ("hydra.sweeper.objectives=[val/loss:min,parameters:min]", "hydra.sweeper.objectives: unknown key ... checkpoint.monitor alone"),
    ("hydra.sweeper.storage=journal", "hydra.sweeper.storage: unknown key ... search.db"),
    ("hydra.sweeper._target_=hydra_plugins.hydra_ax_sweeper.ax_sweeper.AxSweeper", "hydra.sweeper._target_: ... AxSweeper cannot be imported"),
    ("hydra.sweeper.search_space=3", "hydra.sweeper.search_space: unknown key ... hydra.sweeper.params"),
    ("hydra.sweeper.params.seed=1,2", "hydra.sweeper.params.seed: is a key of a file (KEY=VALUES"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "problem"), NOT_SEARCHED)
def test_a_mistake_about_a_search_is_named(words: str, problem: str) -> None:
    assert all(parse(word) for word in words.split())
    told = [str(found) for found in read([OPTUNA, *SPACE, *words.split()])[1]]
    assert told[0] == Says(problem), told


# --- files

SHORT = ["trainer.max_epochs=null", "trainer.max_steps=2", "rehearse=false"]
SEARCHED = """\
defaults: [optuna, override sampler: random, override pruner: percentile]
n_trials: 3
pruner: {percentile: 10}
params:
  optimizer:
    lr: tag(log, interval(1e-4, 1e-1))
  model: mlp
  model.dim: range(8, 17, 8)
  model.num_layers: choice(1, 2)
"""


def sweep_file(folder: Path, name: str, text: str) -> None:
    path = folder / "conf" / "hydra" / "sweeper" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.slow
def test_a_sweep_written_in_a_file_is_named_on_the_line(tmp_path: Path) -> None:
    sweep_file(tmp_path, "widths", "params:\n  model: mlp,cnn\n  optimizer:\n    lr: 1e-3,1e-2\n")
    listed = typed("-m", "hydra/sweeper=widths", "mode=plan", "optimizer.lr=1", directory=tmp_path)
    assert [text.split()[2:] for text in listed.output.splitlines()] == [["model=mlp"], ["model=cnn"]], listed.output
    listed = typed("-m", "hydra/sweeper=widths", "mode=plan", directory=tmp_path)
    assert listed.output.count("optimizer.lr=0.01") == 2 and len(listed.output.splitlines()) == 4, listed.output
    refused = typed("hydra/sweeper=widths", directory=tmp_path)
    assert (refused.code, refused.output) == (78, Says("hydra/sweeper: is about the jobs of a sweep (add -m)"))
    sweep_file(tmp_path, "widths", "params:\n  model: mlp,cnn\nn_trails: 3\n")
    misspelt = typed("-m", "hydra/sweeper=widths", "mode=plan", directory=tmp_path)
    assert misspelt.code == 78 and misspelt.output == Says("hydra.sweeper.n_trails: unknown key"), misspelt.output
    unknown = typed("-m", "hydra/sweeper=width", "mode=plan", directory=tmp_path)
    assert unknown.code == 78 and unknown.output == Says("hydra/sweeper: no option 'width' ... mean widths?"), unknown.output


@pytest.mark.slow
def test_a_search_written_in_a_file_has_intervals_and_choices(tmp_path: Path) -> None:
    sweep_file(tmp_path, "widths", SEARCHED)
    ended = typed("-m", "hydra/sweeper=widths", *SHORT, directory=tmp_path)
    assert ended.code == 0 and "3 jobs: 3 finished" in ended.output, ended.output
    (path,) = tmp_path.glob("runs/sweeps/*/sweep.csv")
    with open(path) as file:
        for row in csv.DictReader(file):
            assert 1e-4 <= float(row["optimizer.lr"]) <= 1e-1 and row["model.dim"] in ("8", "16")
    longer = typed("-m", "hydra/sweeper=widths", "hydra.sweeper.n_trials=4", "mode=plan", *SHORT, directory=tmp_path)
    assert longer.output.splitlines()[-1] == "1 of 4 trials are still to be drawn"
    assert yaml.safe_load(path.with_name("sweep.yaml").read_text())["line"][1] == "hydra/sweeper=widths"


TEMPLATE = """\
# @package _global_
defaults:
  - override /hydra/sweeper: optuna
optimized_metric: "val/acc_best"
hydra:
  mode: "MULTIRUN"
  sweeper:
    _target_: hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper
    storage: null
    study_name: null
    n_jobs: 1
    n_trials: 2
    sampler:
      _target_: optuna.samplers.TPESampler
      seed: 1234
      n_startup_trials: 10
    params:
      optimizer.lr: interval(0.0001, 0.1)
      global_batch_size: choice(32, 64)
"""


@pytest.mark.slow
def test_a_search_file_of_lightning_hydra_template_runs_after_its_named_keys_are_changed(tmp_path: Path) -> None:
    file = tmp_path / "conf" / "hparams_search" / "mnist_optuna.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(TEMPLATE)
    line = ["hparams_search=mnist_optuna", "trainer.max_epochs=null", "trainer.max_steps=1", "rehearse=false"]
    refused = typed(*line, directory=tmp_path)
    assert refused.code == 78
    assert refused.output == Says("optimized_metric: unknown key (a search improves checkpoint.monitor)")
    file.write_text(TEMPLATE.replace('optimized_metric: "val/acc_best"', "checkpoint: {monitor: val/accuracy, mode: max}"))
    ended = typed(*line, directory=tmp_path)
    assert ended.code == 0 and "2 jobs: 2 finished" in ended.output, ended.output
    named = typed(*line, "hydra.sweeper.study_name=other", "hydra.sweeper.n_jobs=2", "mode=plan", directory=tmp_path)
    assert named.output.splitlines()[-1] == "2 of 2 trials are still to be drawn", named.output
    other = typed(*line, "hydra.sweeper.direction=maximize", directory=tmp_path)
    assert other.output == Says("hydra.sweeper.direction: unknown key ... checkpoint.mode")


@pytest.mark.parametrize("text", ["params: {a: [\n", 'params: {seed: "0,1", seed: "2,3"}\n', "params: [a]\n"])
def test_a_file_that_is_no_sweep_is_refused(text: str, tmp_path: Path) -> None:
    sweep_file(tmp_path, "bad", text)
    refused = typed("-m", "hydra/sweeper=bad", directory=tmp_path)
    assert refused.code == 78 and "hydra/sweeper" in refused.output and "Traceback" not in refused.output, refused.output
