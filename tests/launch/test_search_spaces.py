"""Searches with several objectives, with keys of one option, and in files."""

import csv
from pathlib import Path

import pytest
import yaml

from tests.harness import Says, typed
from tests.launch.test_search import SEARCH, SPACE
from tests.launch.test_sweep import job, swept, table

ANY_MODEL = [word for word in SEARCH if not word.startswith("model.")]

# --- several objectives


@pytest.mark.slow
def test_the_pareto_set_of_several_objectives_is_marked_and_told(tmp_path: Path) -> None:
    line = [*ANY_MODEL[:-1], "model=mlp", "model.dim=4,16,64", "optimizer.lr=1e-5,1e-2", "hydra/sweeper/sampler=grid"]
    ended = swept(*line, "hydra.sweeper.objectives=[val/loss:min,parameters:min]", root=tmp_path / "runs")
    assert ended.code == 0, ended.output
    rows = table(ended)
    found = {row["id"]: (float(row["objective:val/loss"]), float(row["objective:parameters"])) for row in rows}
    for row in rows:
        run = job(ended, row)
        best = min((r for r in run.rows if r["split"] == "val"), key=lambda r: r["loss"])
        assert found[row["id"]] == (best["loss"], run.summary["parameters"])
    front = {name for name, own in found.items()
             if not any(other[0] <= own[0] and other[1] <= own[1] and other != own for other in found.values())}  # fmt: skip
    assert 1 < len(front) < 6
    assert {row["id"] for row in rows if row["pareto"] == "true"} == front
    told = [text for text in ended.output.splitlines() if text.startswith("Pareto: val/loss ")]
    assert {text.rpartition("/")[2] for text in told} == front
    longer = swept(*line, "hydra.sweeper.objectives=[val/loss:min,parameters:max]", "mode=plan", root=tmp_path / "runs")
    assert longer.output.splitlines()[-1] == "6 of 6 trials are still to be drawn"  # another search


def test_an_objective_that_is_no_metric_is_refused(tmp_path: Path) -> None:
    refused = swept(*SEARCH[:-1], *SPACE, "hydra.sweeper.objectives=[val/loss:min,val/acuracy:max]", root=tmp_path / "runs")
    assert refused.code == 78 and not list((tmp_path / "runs").iterdir())
    assert refused.output == Says("hydra.sweeper.objectives: 'val/acuracy' ... mean val/accuracy?")


# --- conditions


# --- files

GRID = "params:\n  model: mlp,cnn\n  model.dim@mlp: 8,16\n  optimizer:\n    lr@model:cnn: 1e-3,1e-2\n"
DRAWN = """\
defaults: [optuna, override sampler: random, override pruner: percentile]
n_trials: 3
pruner: {percentile: 10}
params:
  optimizer.lr: tag(log, interval(1e-4, 1e-1))
  model: mlp,cnn
  model.dim@mlp: range(8, 17, 8)
  model.dropout@mlp: interval(0, 0.5)
  model.norm@cnn: choice(batch, group)
"""


def sweep_file(folder: Path, name: str, text: str) -> None:
    path = folder / "conf" / "hydra" / "sweeper" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.slow
def test_a_sweep_written_in_a_file_is_named_on_the_line(tmp_path: Path) -> None:
    sweep_file(tmp_path, "widths", GRID)
    listed = typed("-m", "hydra/sweeper=widths", "mode=plan", directory=tmp_path)
    assert [text.split()[2:] for text in listed.output.splitlines()] == [
        ["model=mlp", "model.dim=8"], ["model=mlp", "model.dim=16"],
        ["model=cnn", "optimizer.lr=0.001"], ["model=cnn", "optimizer.lr=0.01"],
    ], listed.output  # fmt: skip
    fewer = typed("-m", "hydra/sweeper=widths", "mode=plan", "hydra.sweeper.params.model.dim@mlp=32", directory=tmp_path)
    assert fewer.code == 0 and "model.dim=32" in fewer.output and len(fewer.output.splitlines()) == 3, fewer.output
    refused = typed("hydra/sweeper=widths", directory=tmp_path)
    assert (refused.code, refused.output) == (78, Says("hydra/sweeper: is about the jobs of a sweep (add -m)"))
    sweep_file(tmp_path, "widths", GRID + "n_trails: 3\n")
    misspelt = typed("-m", "hydra/sweeper=widths", "mode=plan", directory=tmp_path)
    assert misspelt.code == 78 and misspelt.output == Says("hydra.sweeper.n_trails: unknown key"), misspelt.output
    unknown = typed("-m", "hydra/sweeper=width", "mode=plan", directory=tmp_path)
    assert unknown.code == 78 and unknown.output == Says("hydra/sweeper: no option 'width' ... mean widths?"), unknown.output


@pytest.mark.slow
def test_a_search_written_in_a_file_has_intervals_choices_and_conditions(tmp_path: Path) -> None:
    sweep_file(tmp_path, "widths", DRAWN)
    short = ["trainer.max_epochs=null", "trainer.max_steps=2", "rehearse=false"]
    ended = typed("-m", "hydra/sweeper=widths", *short, directory=tmp_path)
    assert ended.code == 0 and "3 jobs: 3 finished" in ended.output, ended.output
    (path,) = tmp_path.glob("runs/sweeps/*/sweep.csv")
    with open(path) as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert 1e-4 <= float(row["optimizer.lr"]) <= 1e-1
        if row["model"] == "mlp":
            assert row["model.dim"] in ("8", "16") and 0 <= float(row["model.dropout"]) <= 0.5 and not row.get("model.norm")
        else:
            assert row["model.norm"] in ("batch", "group") and not row.get("model.dim")
    longer = typed("-m", "hydra/sweeper=widths", "hydra.sweeper.n_trials=4", "mode=plan", *short, directory=tmp_path)
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
    direction: maximize
    n_trials: 2
    sampler:
      _target_: optuna.samplers.TPESampler
      seed: 1234
      n_startup_trials: 10
    params:
      optimizer.lr: interval(0.0001, 0.1)
      global_batch_size: choice(32, 64)
"""


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


@pytest.mark.parametrize("text", ["params: {a: [\n", 'params: {seed: "0,1", seed: "2,3"}\n', "params: [a]\n"])
def test_a_file_that_is_no_sweep_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "conf" / "hydra" / "sweeper").mkdir(parents=True)
    (tmp_path / "conf" / "hydra" / "sweeper" / "bad.yaml").write_text(text)
    refused = typed("-m", "hydra/sweeper=bad", directory=tmp_path)
    assert refused.code == 78 and "hydra/sweeper" in refused.output and "Traceback" not in refused.output, refused.output
