"""For the first hour with a new model: a few batches, the same few again and again, and which learning rate to take."""

import math
from pathlib import Path

import pytest

from extras.parts.lr_range import LRRange
from tests.harness import assert_close, finished
from tests.test_conformance import MODELS, RUN

TOKENS = [*RUN, *MODELS["gpt, tied"]]


@pytest.mark.slow
def test_a_run_of_a_few_batches_has_short_epochs_and_evaluations(tmp_path: Path) -> None:
    line = [*TOKENS, "trainer.limit_batches=2", "trainer.max_steps=null", "trainer.max_epochs=3", "trainer.eval_every=2"]
    ended = finished(*line, root=tmp_path / "runs")
    assert [row["epoch"] for row in ended.rows if row["split"] == "train"] == [0, 0, 1, 1, 2, 2]
    assert ended.summary["samples_seen"] == 6 * 14
    whole = finished(*TOKENS, "trainer.max_steps=2", "trainer.eval_every=2", root=tmp_path / "whole")
    first = {row["split"]: row["loss"] for row in ended.rows if row["step"] == 2}
    others = {row["split"]: row["loss"] for row in whole.rows if row["step"] == 2}
    assert first["train"] == others["train"] and first["val"] != others["val"]


@pytest.mark.slow
def test_overfitting_trains_and_evaluates_on_the_same_few_samples(tmp_path: Path) -> None:
    line = [*TOKENS, "trainer.overfit_batches=1", "trainer.max_steps=60", "optimizer.lr=0.02", "scheduler.warmup_steps=0",
            "trainer.eval_every=60", "trainer.log_every=60"]  # fmt: skip
    ended = finished(*line, root=tmp_path / "one")
    losses = {row["split"]: row["loss"] for row in ended.rows}
    assert losses["val"] == losses["test"] and losses["val"] < 0.5 < finished(*TOKENS, root=tmp_path / "all").rows[-1]["loss"]
    many = finished(*line, "parallel=fsdp", "launch.nproc_per_node=2", root=tmp_path / "two")
    assert_close(many, ended, tolerance=1e-6)  # sixty steps


def test_the_range_test_finds_where_the_loss_falls_fastest(tmp_path: Path) -> None:
    line = ["experiment=lr_range", "dataset=synthetic", "dataset.image_size=8", "dataset.num_train=200", "dataset.num_val=16",
            "dataset.num_test=16", "model=mlp", "model.dim=16", "optimizer=sgd", "optimizer.lr=1000", "trainer.max_steps=60"]  # fmt: skip
    ended = finished(*line, root=tmp_path / "runs")
    assert (ended.directory / "lr_range.png").stat().st_size > 5000
    assert (
        "the loss explodes at a learning rate of" in ended.output and "the loss falls fastest at optimizer.lr=" in ended.output
    )
    rates = [row["lr"] for row in ended.rows if row["split"] == "train"]
    assert rates[0] == pytest.approx(1000 * 1e-6) and len(rates) < 60
    assert rates[1] / rates[0] == pytest.approx(rates[2] / rates[1]) == pytest.approx(1e6 ** (1 / 59))


def test_the_rate_to_take_is_that_of_the_steepest_fall() -> None:
    part = LRRange(smoothing=0.0)
    part.rates = [10.0**-power for power in range(5, 0, -1)]
    part.losses = [3.0, 2.9, 2.0, 1.9, 4.0]
    assert part.best is not None and math.isclose(part.best, 1e-4)
    part.losses = [1.0, 1.1, 1.2, 1.3, 1.4]
    assert part.best is None
