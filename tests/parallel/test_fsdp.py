"""FSDP2's mixed precision: computed in 16 bits, kept in 32."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from framework.runtime.torch_internals import num_operations
from framework.training.trainer import Trainer
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


def test_what_is_left_of_the_model_is_gathered_once_in_a_step(tmp_path: Path) -> None:
    """Each block is gathered for the forward and for the backward pass, and its gradients are summed; the rest is gathered once."""

    def count() -> None:
        plain = Trainer.train_step

        def train_step(self: Trainer, step: Any, *, measure: bool) -> Any:
            assert dist.group.WORLD is not None
            before = num_operations(dist.group.WORLD)
            result = plain(self, step, measure=measure)
            if self.world.rank == 0:
                with (tmp_path / "counts").open("a") as file:
                    file.write(f"{num_operations(dist.group.WORLD) - before}\n")
            return result

        Trainer.train_step = train_step  # type: ignore[method-assign]

    line = ["model=gpt", "model.dim=16", "model.num_layers=3", "dataset=synthetic", "dataset.kind=tokens", "dataset.num_train=40",
            "task=language_modeling", "global_batch_size=8", "trainer.max_epochs=null", "trainer.max_steps=4", "trainer.log_every=100",
            "trainer.eval_every=null", "checkpoint.every=null", "parallel=fsdp", "launch.nproc_per_node=2", "rehearse=false"]  # fmt: skip
    finished(*line, root=tmp_path / "runs", before=count)
    counts = list(map(int, (tmp_path / "counts").read_text().split()))
    assert counts[1:3] == [3 * 3 + 2 + 1] * 2, counts  # and the weight of the loss
