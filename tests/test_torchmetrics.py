"""Metrics of torchmetrics: each sample once, the same value for any number of processes and strategy, monitors by any of them."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from framework.distributed.agreement import Agreement
from framework.engine.seam import MicroBatch
from framework.runtime.exits import Unfit
from framework.tasks.classification import Classification
from framework.training.metrics import Metrics
from tests.harness import Ended, Says, checked, finished, once, outputs_of, refused
from tests.test_evaluate import evaluated

CLASSES = 5
RUN = ["dataset=synthetic", f"dataset.num_classes={CLASSES}", "dataset.image_size=8", "dataset.num_train=40", "dataset.num_val=31",
       "dataset.num_test=29", "model=vit", "model.dim=16", "model.num_layers=2", "model.num_heads=2", "model.patch_size=4", "precision=fp64",
       "global_batch_size=14", "micro_batch_size=3", "trainer.max_epochs=null", "trainer.max_steps=4", "trainer.eval_every=2",
       "checkpoint.every=2"]  # fmt: skip
METRICS = ["metric=[f1,auroc,calibration,confusion_matrix,precision_recall]", "metric.f1.average=none"]
OWN = ["metric.confusion_matrix._target_=tests.own_metrics.Odd"]
TWO = "launch.nproc_per_node=2"


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    importlib.import_module("torchmetrics")  # two seconds, which not every test process need spend, nor each command


def whole_rows(run: Ended) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]


def columns(run: Ended) -> list[dict[str, Any]]:
    known = ("f1", "auroc", "calibration", "confusion_matrix", "precision", "recall")
    rows = [row for row in whole_rows(run) if row["split"] != "train"]
    return [{name: value for name, value in row.items() if name.startswith(known)} for row in rows]


def one() -> Ended:
    return once(*RUN, *METRICS)


STRATEGIES = {
    "zero": ["launch.nproc_per_node=3"], "tensor": [TWO, "model.dropout=0"], "pipeline": [TWO], "pp+fsdp+tp": ["launch.nproc_per_node=8"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_do_not_depend_on_the_number_of_processes(strategy: str, tmp_path: Path) -> None:
    several = finished(*RUN, *METRICS, f"parallel={strategy}", *STRATEGIES[strategy], root=tmp_path / "runs")
    expected, found = columns(one()), columns(several)
    assert len(found) == 3 and all(len(row) == 6 for row in found)
    for row, other in zip(found, expected):
        for name, value in row.items():
            assert torch.tensor(value).allclose(torch.tensor(other[name]), rtol=1e-12, atol=0), name


def test_only_rank_0_receives_the_states_and_all_ranks_have_its_values() -> None:
    class OnRank1(Agreement):
        """Another rank is rank 0, and has computed this."""

        def gather(self, value: Any) -> list[Any]:
            raise AssertionError("a collective that sends every rank's value to every rank")

        def to_rank_0(self, value: Any) -> list[Any]:
            sent.append(value)
            return []

        def from_rank_0(self, value: Any) -> Any:
            return theirs

    from torchmetrics.classification import MulticlassAUROC

    metrics = Metrics({"auroc": MulticlassAUROC(num_classes=3)}, pairs=lambda outputs, targets: (outputs, targets),
                      device=torch.device("cpu"), seed=0)  # fmt: skip
    group: Any = SimpleNamespace(rank=lambda: 1)
    world: Any = SimpleNamespace(agreement=OnRank1(group))
    sent: list[Any] = []
    theirs: Any = ({"auroc": 0.75}, None)
    for _ in range(2):
        metrics.observe(torch.rand(8, 3).softmax(1), MicroBatch(0, torch.zeros(8), torch.arange(8) % 3, 8, 0))
        assert metrics.compute(world=world) == {"auroc": 0.75}
    assert [len(state.lists["preds"][0][1]) for value in sent for state in value["auroc"]] == [1, 1]  # it has forgotten
    theirs = (None, Unfit("metric.auroc: its value cannot be computed"))
    with pytest.raises(Unfit, match="auroc"):
        metrics.compute(world=world)


@pytest.mark.slow
def test_states_of_every_kind_are_those_of_one_process(tmp_path: Path) -> None:
    line = [*RUN, "metric=confusion_matrix", *OWN]
    alone = finished(*line, root=tmp_path / "one")
    several = finished(*line, "parallel=ddp", "launch.nproc_per_node=3", root=tmp_path / "several")
    pairs = list(zip(columns(several), columns(alone)))
    assert len(pairs) == 3
    for found, expected in pairs:
        assert found.keys() == expected.keys() and found["confusion_matrix_pair"] == [1.0, 2.0]
        for name in ("order", "largest", "count"):
            assert found[f"confusion_matrix_{name}"] == pytest.approx(expected[f"confusion_matrix_{name}"], rel=1e-12)


def test_they_are_what_the_library_computes_of_all_samples_at_once() -> None:
    from torchmetrics.functional import auroc, f1_score

    outputs, targets = outputs_of(one(), "test")
    row = columns(one())[-1]
    assert row["auroc"] == pytest.approx(float(auroc(outputs, targets, task="multiclass", num_classes=CLASSES)), rel=1e-9)
    f1 = f1_score(outputs, targets, task="multiclass", num_classes=CLASSES, average="none")
    assert row["f1"] == pytest.approx(f1.tolist(), rel=1e-6)
    counts = torch.tensor(row["confusion_matrix"])
    assert counts.shape == (CLASSES, CLASSES)
    assert counts.sum(1).tolist() == torch.bincount(targets, minlength=CLASSES).tolist()


def test_only_the_file_has_lists_of_numbers() -> None:
    for row in one().summary["metrics"]["val"].values():
        assert "auroc" in row and not any(isinstance(value, list) for value in row.values())
    assert "confusion_matrix" not in one().output and "auroc 0." in one().output


def test_best_and_patience_follow_the_metric_in_its_direction(tmp_path: Path) -> None:
    more = ["checkpoint.monitor=val/auroc", "trainer.early_stopping.monitor=val/auroc", "trainer.early_stopping.patience=9"]
    config = checked(*RUN, *METRICS, *more)
    assert config.checkpoint.mode == "max" and config.trainer.early_stopping.mode == "max"
    assert checked(*RUN, *METRICS, "checkpoint.monitor=val/calibration").checkpoint.mode == "min"
    assert checked(*RUN, *METRICS, "checkpoint.monitor=val/accuracy").checkpoint.mode == "max"
    ended = finished(*RUN, *METRICS, *more, "checkpoint.keep_best=1", root=tmp_path / "runs")
    values = [row["auroc"] for row in columns(ended)[:-1]]
    assert ended.summary["metrics"]["val"]["best"]["auroc"] == max(values)


def test_it_is_measured_in_an_evaluation_too(tmp_path: Path) -> None:
    row = evaluated(one().directory, "parallel=ddp", TWO, root=tmp_path / "none")
    for name in ("auroc", "precision"):  # also the name of a fact about the evaluation
        assert row[name] == pytest.approx(columns(one())[-1][name], rel=1e-12)
    assert row["eval_precision"] == "fp64" and row["parallel"] == "ddp"


@pytest.mark.slow
def test_what_a_value_draws_does_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    line = [*RUN, "metric=f1", "metric.f1._target_=tests.own_metrics.OfSome"]
    one = finished(*line, root=tmp_path / "one")
    two = finished(*line, "parallel=ddp", TWO, root=tmp_path / "two")
    assert [row["f1"] for row in columns(two)] == pytest.approx([row["f1"] for row in columns(one)], rel=1e-12)


class Steps(Classification):
    loss = None

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        return call(batch.inputs).square().sum()


def not_a_metric() -> nn.Module:
    return nn.Linear(1, 1)


REFUSED = {
    "no metric": (["metric=f1", "metric.f1._target_=tests.test_torchmetrics.not_a_metric"], "metric.f1: ... gives a Linear (a torchmetrics.Metric)"),
    "another task": (["metric=r2"], "metric.r2: does not take this task's outputs and targets: ... predictions() ..."),
    "averages": (["metric=f1", "metric.f1._target_=tests.own_metrics.ByMeans", "parallel=ddp", TWO], "metric.f1: ByMeans averages its state share ..."),
    "an unknown direction": ([*METRICS, "checkpoint.monitor=val/confusion_matrix"], "checkpoint.mode: null, but it is not known ... (min or max; ..."),
    "an unknown monitor": ([*METRICS, "checkpoint.monitor=val/aurok"], "checkpoint.mode: null, but it is not known ... did you mean val/auroc?"),
    "an own step": (["metric=f1", "task._target_=tests.test_torchmetrics.Steps", "task.label_smoothing=0.0"], "metric: ... measures in its step() ..."),
}  # fmt: skip


@pytest.mark.quick(4)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_measured_is_refused_before_the_start(what: str) -> None:
    words, expected = REFUSED[what]
    assert refused(*RUN, *words, "rehearse=true") == Says(expected)


def test_tokens_are_classes_in_a_dimension_that_torchmetrics_expects(tmp_path: Path) -> None:
    line = ["dataset=synthetic", "dataset.kind=tokens", "dataset.num_train=8", "dataset.num_val=5", "dataset.num_test=5",
            "dataset.seq_len=6", "dataset.vocab_size=12", "task=language_modeling", "model=gpt", "model.dim=16", "model.num_layers=1",
            "model.num_heads=2", "model.dropout=0", "global_batch_size=4", "trainer.max_epochs=1", "metric=f1", "metric.f1.num_classes=12",
            "metric.f1.average=micro"]  # fmt: skip
    ended = finished(*line, root=tmp_path / "runs")
    row = ended.summary["metrics"]["test"]["last"]
    assert row["f1"] == pytest.approx(row["accuracy"])
