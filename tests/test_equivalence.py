"""The promise: how a run is executed does not change what it computes."""

from pathlib import Path

import pytest

from framework.config import options
from tests.harness import Ended, assert_close, finished

STRATEGIES = [name for name in options("parallel") if name != "single"]
# 14 steps of 14 and a short one of 4 in each epoch: no rank's share is even
DATA = ["dataset=synthetic", "dataset.num_train=200", "dataset.image_size=8", "dataset.seq_len=12", "precision=fp64", "trainer.log_every=1", "trainer.eval_every=10"]
MODELS = {
    "cnn": ["model=cnn", "model.channels=[4,8]", "model.norm=batch"],
    "gpt": ["model=gpt", "model.dim=16", "model.num_layers=2", "model.num_heads=2", "model.dropout=0.1"],
}
KINDS = {"cnn": ["dataset.kind=images", "dataset.num_val=31", "dataset.num_test=32"], "gpt": ["dataset.kind=tokens", "task=language_modeling"]}
BATCH = ["optimizer.lr=0.01", "global_batch_size=14", "micro_batch_size=4", "trainer.max_epochs=null", "trainer.max_steps=20"]


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return {name: finished(*command(name), root=tmp_path_factory.mktemp(name) / "runs") for name in MODELS}


def command(model: str) -> list[str]:
    return [*DATA, *MODELS[model], *KINDS[model], *BATCH, "trainer.clip_grad_norm=0.5"]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_compute_what_one_process_does(
    strategy: str, model: str, ranks: int, single: dict[str, Ended], tmp_path: Path
) -> None:
    run = finished(*command(model), f"parallel={strategy}", f"launch.nproc_per_node={ranks}", root=tmp_path / "runs")
    assert_close(run, single[model])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_micro_batch_size_models_without_batch_statistics_still_agree(
    strategy: str, ranks: int, single_whole: Ended, tmp_path: Path
) -> None:
    run = finished(*WHOLE, f"parallel={strategy}", f"launch.nproc_per_node={ranks}", root=tmp_path / "runs")
    assert_close(run, single_whole)
    assert "depends on the number of processes" not in run.output


# a batch of 2 among 3 ranks: one of them has nothing to do in any step
WHOLE = [*DATA, "model=cnn", "model.channels=[4,8]", *KINDS["cnn"], "global_batch_size=2", "trainer.max_epochs=null",
         "trainer.max_steps=20", "optimizer=sgd", "optimizer.lr=0.01"]  # fmt: skip


@pytest.fixture(scope="session")
def single_whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return finished(*WHOLE, root=tmp_path_factory.mktemp("whole") / "runs")


def test_a_model_with_batch_statistics_is_told_to_set_micro_batch_size(tmp_path: Path) -> None:
    line = [*WHOLE, "model.norm=batch", "model.dropout=0.5", "parallel=ddp", "launch.nproc_per_node=2"]
    run = finished(*line, "global_batch_size=8", root=tmp_path / "runs")
    assert run.output.count("the model has BatchNorm2d and Dropout: what it computes depends on the number of") == 1
