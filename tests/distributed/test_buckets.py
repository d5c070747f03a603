"""Many tensors travel in few messages, and arrive as if each had travelled alone."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed import buckets
from framework.distributed.agreement import Agreement
from framework.distributed.world import World
from tests import test_walk
from tests.product import configured
from tests.ranks import on_ranks
from tests.test_walk import TOKENS, counting, of_a_step

SHAPES = [(3, 4), (), (0, 2), (1000,), (7, 1, 5), (300,), (2,)]


def tensors(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    made += [torch.arange(5) + rank, torch.randn(4, 6, generator=generator).t(), torch.randn(3, generator=generator).double()]
    return made


@pytest.mark.parametrize("size", [64, 1 << 20])
def test_sums_and_copies_are_those_of_each_tensor_alone(size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(buckets, "_BUCKET", size)

    def act(world: World) -> Any:
        counts = Counter[str]()
        counting(dist, test_walk.MESSAGES, counts)
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
    ranks = 4 if "pp" in strategy else 2
    processes = [*strategy.split(), f"launch.nproc_per_node={ranks}", f"run.dir={tmp_path}/run"]
    config = configured(*TOKENS, "optimizer=adamw", "model.num_layers=8", *processes)

    def act(world: World) -> int:
        Agreement.any_flags = lambda _, *flags, now=True: list(flags)
        return of_a_step(world, config, partial(counting, dist, test_walk.MESSAGES))

    (tmp_path / "scratch").mkdir()
    assert on_ranks(ranks, act, scratch=tmp_path / "scratch")[0] == MESSAGES[strategy]
