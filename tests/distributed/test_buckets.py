"""Many tensors travel in few messages, and arrive as if each had travelled alone."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed import buckets
from framework.distributed.agreement import Agreement
from framework.distributed.world import World
from framework.runtime.environment import Environment
from framework.training.loop import Trainer
from tests.harness import after_each, finished
from tests.ranks import on_ranks
from tests.test_loop import TINY

SHAPES = [(3, 4), (), (0, 2), (1000,), (7, 1, 5), (300,), (2,)]


def tensors(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    made += [torch.arange(5) + rank, torch.randn(4, 6, generator=generator).t(), torch.randn(3, generator=generator).double()]
    return made


def count_messages(counts: Counter[str]) -> None:
    """Let this process count its collectives of torch.distributed."""

    def counting(name: str, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return counted

    for name in ("all_reduce", "broadcast"):
        setattr(dist, name, counting(name, getattr(dist, name)))


@pytest.mark.parametrize("size", [64, 1 << 20])
def test_sums_and_copies_are_those_of_each_tensor_alone(size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(buckets, "_BUCKET", size)

    def act(world: World) -> Any:
        counts = Counter[str]()
        count_messages(counts)
        summed, given = tensors(world.rank), {rank: tensors(world.rank) for rank in (1, 0)}
        buckets.sum_all(summed)
        buckets.broadcast_all(given)
        expected = [ours + theirs for ours, theirs in zip(tensors(0), tensors(1))]
        assert all(torch.equal(*pair) for pair in zip(summed, expected, strict=True))
        assert all(torch.equal(*pair) for rank in (0, 1) for pair in zip(given[rank], tensors(rank), strict=True))
        return dict(counts)

    for counts in on_ranks(2, act, scratch=tmp_path):
        if size > 64:
            assert counts == {"all_reduce": 3, "broadcast": 6}, "one for each type, and source"
        else:
            assert counts["all_reduce"] == 8, "no message is larger, but of a larger tensor"


MESSAGES = {
    "parallel=zero": 4,  # the gradients; the loss's weight; the weights of each of two owners
    "parallel=ddp+pp parallel.replicate=2": 2,  # the gradients; the loss's weight
    "parallel=local-sgd parallel.sync_every=1 parallel.sync_first=0": 3,  # the weights; whether all have the same states; AdamW's moments
    "parallel=local-sgd parallel.sync_every=1 parallel.sync_first=9": 3,  # the loss's weight; which weights have gradients; the gradients
    "parallel=diloco parallel.sync_every=1": 3,  # as local-sgd: the outer optimizer sends nothing
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("strategy", MESSAGES)
def test_a_step_sends_messages_by_size_not_by_parameter(strategy: str, tmp_path: Path) -> None:
    def count() -> None:
        counts, at_step = Counter[str](), dict[int, int]()
        count_messages(counts)
        Agreement.any_flags = lambda _, *flags, now=True: list(flags)

        def note(trainer: Trainer, *_: Any, **__: Any) -> None:
            at_step[trainer.progress.step] = counts.total()
            if trainer.progress.step == 3 and Environment.read().rank == 0:
                (tmp_path / "counts").write_text(json.dumps(at_step[3] - at_step[2]))

        after_each(Trainer, "train_step", note)

    line = [
        *TINY, "optimizer=adamw", "model.num_layers=8", "trainer.max_steps=4", "trainer.log_every=4",
        "trainer.max_epochs=null",
    ]  # fmt: skip
    finished(*line, *strategy.split(), f"launch.nproc_per_node={4 if 'pp' in strategy else 2}", root=tmp_path, before=count)
    assert json.loads((tmp_path / "counts").read_text()) == MESSAGES[strategy]
