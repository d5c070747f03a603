"""FSDP2's mixed precision: computed in 16 bits, kept in 32."""

from pathlib import Path

import pytest
import torch

from tests.harness import Ended, finished

RUN = ["model=cnn", "model.channels=[16,32]", "model.norm=batch", "micro_batch_size=16", "trainer.max_epochs=3",
       "trainer.eval_every=null", "checkpoint.every=null", "launch.nproc_per_node=2"]  # fmt: skip


@pytest.fixture(scope="module")
def whole_precision(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return finished(*RUN, "parallel=fsdp", root=tmp_path_factory.mktemp("fp32") / "runs")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_sixteen_bit_computing_learns_and_keeps_its_weights_in_thirty_two(
    strategy: str, whole_precision: Ended, tmp_path: Path
) -> None:
    line = [*RUN, f"parallel={strategy}", "parallel.param_dtype=bf16", "parallel.reduce_dtype=fp32"]
    run = finished(*line, root=tmp_path / "runs")
    losses = [ended.summary["metrics"]["test"]["last"]["loss"] for ended in (run, whole_precision)]
    assert losses[0] == pytest.approx(losses[1], abs=0.1)
    for name, tensor in whole_precision.weights.items():
        assert run.weights[name].dtype == tensor.dtype
    assert not torch.equal(run.weights["head.weight"], whole_precision.weights["head.weight"])  # it was used
