"""Many ranks: what they agree on among 64 processes, and what a run of 1,024 ranks sends, counted."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg  # which registers the backend

from framework import compose
from framework.build.training import Builder
from framework.checkpoint import chunks
from framework.checkpoint.format import Chunk
from framework.distributed import world as worlds
from framework.distributed.groups import Groups
from framework.distributed.world import World
from framework.modes.train import train
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit
from tests.emulated_tensors import Done


@dataclass
class Wire:
    """What one rank of many sends: the other ranks are played, and have what rank 0 has.

    Rank 0's sums, broadcasts and scatters are kept for another rank, which is played later, and takes them in the same order.
    """

    rank: int
    kept: list[list[Tensor]]
    calls: list[tuple[str, int]] = field(default_factory=list)  # each collective, and the bytes that every rank gets of it
    to_rank_0: Counter[str] = field(default_factory=Counter)  # bytes of this rank
    _taken: Iterator[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self._taken = iter(self.kept)

    def all_reduce(self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        self._share("all_reduce", tensor)
        return Done([tensor]) if async_op else None

    def broadcast(self, tensor: Tensor, src: int = 0, **_: Any) -> None:
        self._share("broadcast", tensor)

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor] | None = None, **_: Any) -> None:
        self._note("scatter", tensor)
        if scatter_list is not None:
            self.kept.append([part.clone() for part in scatter_list])
            tensor.copy_(scatter_list[0])
        else:
            tensor.copy_(next(self._taken)[self.rank])

    def gather(self, tensor: Tensor, gather_list: list[Tensor] | None = None, **_: Any) -> None:
        self._note("gather", tensor[:0])
        self.to_rank_0["gather"] += tensor.nbytes
        for part in gather_list or ():
            part.copy_(tensor)

    def all_gather(self, parts: list[Tensor], tensor: Tensor, **_: Any) -> None:
        self._note("all_gather", *parts)
        for part in parts:
            part.copy_(tensor)

    def barrier(self, **_: Any) -> None:
        self._note("barrier")

    def _share(self, name: str, tensor: Tensor) -> None:
        self._note(name, tensor)
        if self.rank == 0:
            self.kept.append([tensor.clone()])
        else:
            tensor.copy_(next(self._taken)[0])

    def _note(self, name: str, *received: Tensor) -> None:
        self.calls.append((name, sum(tensor.nbytes for tensor in received)))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Wire]:
    """Return how one rank of many is played: `play(rank, size, line, kept)` runs a command, and returns what it sends."""

    def run(rank: int, num_ranks: int, line: list[str], kept: list[list[Tensor]]) -> Wire:
        wire = Wire(rank, kept)
        new_group = distributed_c10d.new_group
        with monkeypatch.context() as patched:
            for name in ("all_reduce", "broadcast", "scatter", "gather", "all_gather", "barrier"):
                for module in (dist, distributed_c10d):
                    patched.setattr(module, name, getattr(wire, name))
            patched.setattr(dist, "new_group", lambda *ranks, **options: new_group(*ranks, **options | {"backend": "fake"}))
            patched.setattr(worlds, "require_one_kind", lambda *_, **__: None)
            patched.setattr(worlds, "attempt_store", lambda *_, **__: fake_pg.FakeStore())
            # what rank 0 is said to share with all others would be written by them, and they are not there
            patched.setattr(chunks, "deal", lambda holdings: [set(holdings[0].shared), *(set() for _ in holdings[1:])])
            patched.setattr(chunks.WritePlan, "_own", lambda *_: set())
            join = Groups.join

            def fake_join(groups: Groups, store: dist.Store) -> None:
                groups.backend = "fake"
                join(groups, store)

            patched.setattr(Groups, "join", fake_join)
            place = Environment(rank=rank, local_rank=0, world_size=num_ranks, local_world_size=1)
            world = World.start(place, backend="gloo", timeout_s=20.0, scratch=None)
            try:
                assert train(Builder(compose(*line), world=world)) == Exit.FINISHED
                world.groups.leave()
            finally:
                world.stop()
        return wire

    return run


LINE = ["parallel=ddp", "trainer.max_epochs=null", "trainer.max_steps=5", "trainer.eval_every=2", "trainer.log_every=1", "checkpoint.every=2",
        "checkpoint.async_save=false", "rehearse=false"]  # fmt: skip


@pytest.mark.slow
def test_what_every_rank_gets_does_not_grow_with_the_number_of_ranks(play: Callable[..., Wire], tmp_path: Path) -> None:
    """Of a start, five steps, two evaluations and three saves; and of a resume, with a step and a save."""
    sent: dict[int, list[Wire]] = {}
    for num_ranks in (16, 1024):
        folder = tmp_path / f"{num_ranks:04}"  # names of one length: they are sent, too
        folder.mkdir()
        for is_resume in (False, True):
            if is_resume:  # as if it had been killed before its last save
                shutil.rmtree(folder / "checkpoints" / "step_00000005")
            kept: list[list[Tensor]] = []
            first, last = (play(rank, num_ranks, [*LINE, f"run.dir={folder}"], kept) for rank in (0, num_ranks - 1))
            assert first.calls == last.calls  # each collective has met its like
            sent.setdefault(num_ranks, []).append(first)
    for few, many in zip(sent[16], sent[1024]):
        assert [name for name, _ in many.calls] == [name for name, _ in few.calls] and many.to_rank_0 == few.to_rank_0
        # a row, and a save, have the memory and the trail of each rank, two numbers of 8 bytes; a gather has the size of each
        # rank's object: nothing else grows (times have more digits, or fewer, in a checkpoint's state)
        growth = [more - less for (_, more), (_, less) in zip(many.calls, few.calls)]
        assert all(abs(size) < 64 or size in (8 * (1024 - 16), 16 * (1024 - 16)) for size in growth), growth
        assert growth.count(16 * (1024 - 16)) <= 12  # 5 rows of steps, their evaluations and saves
        names = Counter(name for name, _ in many.calls)
        assert names["all_gather"] == names["gather"] > 0 and names["broadcast"]
    begun, resumed = sent[1024]
    # beside gradients, and the 8 bytes of each rank in a gather: of what describes a model of 200 kB, not the model
    assert sum(size for name, size in [*begun.calls, *resumed.calls] if name not in ("all_reduce", "all_gather")) < 25_000
    assert sum(name == "all_reduce" for name, _ in resumed.calls) < sum(name == "all_reduce" for name, _ in begun.calls)


@pytest.mark.parametrize("num_ranks", [16, 1024])
def test_a_rank_plans_only_its_own_part_of_a_save(num_ranks: int) -> None:
    """What no other rank has is not sent, and rank 0 deals only what is shared, however many ranks there are."""
    sent = list[chunks.Holding]()

    def scatter_plan(holding: chunks.Holding, deal: Callable[..., Any]) -> Any:
        sent.append(holding)
        return deal([holding] * num_ranks)[3]

    agreement = SimpleNamespace(
        distinct=lambda value: {0: value}, sum=lambda counts: counts * num_ranks, scatter_plan=scatter_plan
    )
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=3, world_size=num_ranks)
    try:
        mesh = init_device_mesh("cpu", (num_ranks,))
        cut = {f"layers.{number}": DTensor.from_local(torch.zeros(1, 8), mesh, [Shard(0)]) for number in range(9)}
        mine = chunks.WritePlan(SimpleNamespace(agreement=agreement)).mine(cut | {"bias": torch.zeros(5)})
    finally:
        dist.destroy_process_group()
    assert mine.keys() == cut.keys() and sent == [(9 * 32, {Chunk("bias", (0,), (5,)): 20})]
