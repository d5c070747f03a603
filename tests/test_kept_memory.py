"""What `mode=check` prints about memory is what a run's ranks then keep."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from framework.build.training import Builder
from framework.cli.kept_memory import kept_memory
from framework.distributed.world import World
from framework.optim.update import Update
from framework.training.loop import Trainer
from tests.harness import after_each, before_each, checked, finished
from tests.test_loop import TINY

GPT = ["model=gpt", "dataset=text", "device=cpu", "dataset.seq_len=16", "model.dim=32", "model.num_layers=8"]


def build(*line: str) -> Builder:
    return Builder(checked(*line), world=World.alone())


def measure(folder: Path) -> None:
    """Let each rank of a run write how many bytes it has after a step."""
    trainers: list[Trainer] = []

    def size(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            mine = value.to_local() if isinstance(value, DTensor) else value
            return mine.numel() * mine.element_size()
        return sum(map(size, value.values())) if isinstance(value, dict) else 0

    def note(update: Update, *_: Any, **__: Any) -> None:
        module = trainers[0].engine.module
        found = {
            "parameters": size(dict(module.named_parameters())),
            "buffers": size(dict(module.named_buffers())),
            "gradients": sum(size(parameter.grad) for parameter in module.parameters()),
            "optimizer": size(dict(update.optimizer.state)),
            "average": size(update.average.tensors) if update.average is not None else 0,
        }
        (folder / f"bytes_{trainers[0].world.rank}.json").write_text(json.dumps(found))

    before_each(Trainer, "fit", trainers.append)
    after_each(Update, "take", note)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("strategy", "ranks"), (
    [("single", 1), ("fsdp", 2), ("zero", 2), ("ddp", 2), ("zero", 3), ("fsdp", 3), ("tensor", 2), ("hsdp", 4), ("pipeline", 2),
     ("context", 2), ("ddp+pp", 4)]))  # fmt: skip
def test_the_bytes_are_those_of_a_run_s_ranks(strategy: str, ranks: int, tmp_path: Path) -> None:
    line = [*GPT, "model.num_layers=2", f"parallel={strategy}", f"launch.nproc_per_node={ranks}", "trainer.max_steps=2",
            "trainer.max_epochs=null", "trainer.eval_every=null", "trainer.limit_batches=2", "trainer.ema_decay=0.9", "rehearse=false"]  # fmt: skip
    planned = [kept_memory(build(*line), rank=rank) for rank in range(ranks)]
    finished(*line, root=tmp_path / "runs", before=partial(measure, tmp_path))
    for rank in range(ranks):
        found = json.loads((tmp_path / f"bytes_{rank}.json").read_text())
        if strategy == "tensor":  # the gradient of the embedding is whole, which only a backward pass shows
            assert planned[rank].pop("gradients") < found.pop("gradients")
        assert planned[rank] == found


def test_sharding_divides_what_it_shards_and_nothing_else() -> None:
    line = [*TINY, "launch.nproc_per_node=4", "trainer.ema_decay=0.9"]
    whole, sharded = (kept_memory(build(*line, f"parallel={name}")) for name in ("ddp", "fsdp"))
    assert whole["parameters"] == whole["gradients"] == whole["average"]
    for kind in ("parameters", "gradients"):
        assert sharded[kind] == pytest.approx(whole[kind] / 4, rel=0.05)


def test_a_model_that_memory_cannot_hold_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(ValueError, match=r"takes up to .*, which are not free"):
        kept_memory(build(*TINY, "parallel=ddp", "launch.nproc_per_node=2"))
