"""FSDP2's mixed precision: computed in 16 bits, kept in 32."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.parallel import shard
from framework.training.loop import Trainer
from tests.harness import Says, around, command, finished, num_operations, once

RUN = ["model=cnn", "model.channels=[16,32]", "model.norm=batch", "micro_batch_size=16", "trainer.max_epochs=3",
       "trainer.eval_every=null", "checkpoint.every=null", "launch.nproc_per_node=2"]  # fmt: skip


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor, *, chosen: int) -> Tensor:
        return self.layers[chosen](x)


class Choice(nn.Module):
    """A model whose samples choose, from a step on, one of two equal layers or the order of two equal blocks."""

    def __init__(self, *, of: str, after: int = 2) -> None:
        super().__init__()
        self.after = after
        self.of, self.stem, self.head = of, nn.Linear(64, 6), nn.Linear(6, 10)
        self.blocks = nn.ModuleList([Pair(), Pair()])
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, images: Tensor) -> Tensor:
        self.step += self.training
        chosen = int(self.training and self.step > self.after and torch.rand(()) < 0.5)
        order, layer = ([chosen, 1 - chosen], 0) if self.of == "blocks" else ([0, 1], chosen)
        x = self.stem(images.flatten(1)[:, :64])
        for number in order:
            x = self.blocks[number](x, chosen=layer)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_sixteen_bit_computing_learns_and_keeps_its_weights_in_thirty_two(strategy: str, tmp_path: Path) -> None:
    line = [*RUN, f"parallel={strategy}", "parallel.param_dtype=bf16", "parallel.reduce_dtype=fp32"]
    run = finished(*line, root=tmp_path / "runs")
    losses = [ended.summary["metrics"]["test"]["last"]["loss"] for ended in (run, once(*RUN, "parallel=fsdp"))]
    assert losses[0] == pytest.approx(losses[1], abs=0.1)
    for name, tensor in once(*RUN, "parallel=fsdp").weights.items():
        assert run.weights[name].dtype == tensor.dtype
    assert not torch.equal(run.weights["head.weight"], once(*RUN, "parallel=fsdp").weights["head.weight"])  # it was used


@pytest.mark.slow
def test_what_is_left_of_the_model_is_gathered_once_in_a_step(tmp_path: Path) -> None:
    """Each block is gathered for the forward and for the backward pass, and its gradients are summed; the rest is gathered once."""

    def count() -> None:
        def train_step(plain: Any, self: Trainer, step: Any, *, measure: bool) -> Any:
            assert dist.group.WORLD is not None
            before = num_operations(dist.group.WORLD)
            result = plain(self, step, measure=measure)
            if self.world.rank == 0:
                with (tmp_path / "counts").open("a") as file:
                    file.write(f"{num_operations(dist.group.WORLD) - before}\n")
            return result

        around(Trainer, "train_step", train_step)

    line = ["model=gpt", "model.dim=16", "model.num_layers=3", "dataset=synthetic", "dataset.kind=tokens", "dataset.num_train=40",
            "task=language_modeling", "global_batch_size=8", "trainer.max_epochs=null", "trainer.max_steps=4", "trainer.log_every=100",
            "trainer.eval_every=null", "checkpoint.every=null", "parallel=fsdp", "launch.nproc_per_node=2", "rehearse=false"]  # fmt: skip
    finished(*line, root=tmp_path / "runs", before=count)
    counts = list(map(int, (tmp_path / "counts").read_text().split()))
    assert counts[1:3] == [3 * 3 + 2 + 1] * 2, counts  # and the weight of the loss


@pytest.mark.quick(1)
@pytest.mark.parametrize("of", ["layers", "blocks"])
def test_a_choice_that_differs_between_processes_ends_the_run_before_the_next_row(of: str, tmp_path: Path) -> None:
    """The messages have equal sizes, so those of different layers or blocks are paired, and nothing else fails."""
    line = ["model._target_=tests.parallel.test_fsdp.Choice", f"+model.of={of}", "model.parts.blocks=[blocks.0,blocks.1]",
            "micro_batch_size=4", "global_batch_size=8", "trainer.max_steps=12", "trainer.max_epochs=null", "trainer.log_every=6",
            "checkpoint.every=2", "trainer.eval_every=null", "parallel=fsdp", "launch.nproc_per_node=2"]  # fmt: skip
    ended = command(*line, root=tmp_path / "runs")
    assert ended.code == 78 and "rank 1 has called other blocks than rank 0, or has gradients" in ended.output, ended.output
    assert [path.name for path in ended.directory.glob("checkpoints/step_*")] == ["step_00000002"]


def test_a_weight_that_is_not_contiguous_is_named() -> None:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.randn(3, 2).t())
    assert shard.problems(model) == [Says("the model's weight is not contiguous in memory, which FSDP cannot shard; ...")]
