"""What the ranks agree on: each method of Agreement, on real gloo groups, and in a world of one process."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.distributed.world import World
from framework.runtime.environment import Environment
from framework.runtime.exits import DiskFailed, NoValidCheckpoint
from tests.harness import num_operations
from tests.ranks import on_ranks


@pytest.fixture
def alone() -> World:
    return World.start(Environment(), backend="gloo", timeout_s=5.0, scratch=None)


def test_values_are_gathered_in_rank_order(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        return world.agreement.gather({"rank": world.rank}), world.agreement.from_rank_0(f"from {world.rank}")

    assert on_ranks(3, act, scratch=tmp_path) == [([{"rank": rank} for rank in range(3)], "from 0")] * 3


def test_what_rank_0_deals_out_reaches_each_rank_alone(tmp_path: Path) -> None:
    def act(world: World) -> tuple[Any, int]:
        calls = list[list[Any]]()

        def deal(values: list[Any]) -> list[Any]:
            calls.append(values)
            return [f"{value} of {len(values)}" for value in values]

        return world.agreement.scatter_plan(world.rank * 10, deal), len(calls)

    assert on_ranks(3, act, scratch=tmp_path) == [("0 of 3", 1), ("10 of 3", 0), ("20 of 3", 0)]
    assert World.alone().agreement.scatter_plan("a", lambda values: values * 2) == "a"


def test_a_sum_is_over_all_ranks_and_in_place(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        mine = torch.tensor([1.0, 10.0**world.rank], dtype=torch.float64)
        total = world.agreement.sum(mine)
        return total is mine, mine.tolist()

    assert on_ranks(3, act, scratch=tmp_path) == [(True, [3.0, 111.0])] * 3


def test_long_arrays_and_tensors_are_compared_whole(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        same, middle, digits = (torch.zeros(5000, dtype=torch.float64) for _ in range(3))
        middle[2500], digits[0] = world.rank, 1e-9 * world.rank
        kinds = [{"it": [make(value)]} for value in (same, middle, digits) for make in (torch.Tensor.numpy, torch.clone)]
        return [len(world.agreement.distinct(kind)) for kind in kinds]

    assert on_ranks(2, act, scratch=tmp_path) == [[1, 1, 2, 2, 2, 2]] * 2


def test_a_flag_of_any_rank_is_seen_by_all_at_the_next_call(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        raised = [(False, False), (world.rank == 1, False), (False, world.rank == 0), (False, False)]
        return [world.agreement.any_flags(*flags) for flags in raised]

    expected = [[False, False], [False, False], [True, False], [False, True]]  # each call returns the flags of the call before
    assert on_ranks(2, act, scratch=tmp_path) == [expected] * 2


def test_between_rows_the_others_are_asked_by_the_clock(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        agreement = world.agreement
        agreement.take_pace(call_s=0.05)
        told = [agreement.any_flags(world.rank == 1, now=False) for _ in range(5)]
        told += [
            agreement.any_flags(True, now=True),
            agreement.any_flags(False, now=False),
            agreement.any_flags(False, now=False),
        ]
        agreement.finish()
        return told, num_operations(world.agreement.group)

    told = [[False], [False], [True], [False], [True], [False], [True], [False]]  # asked by calls 2, 4, 6 (a row's) and 8
    assert on_ranks(2, act, scratch=tmp_path) == [(told, 4)] * 2


def test_the_others_are_asked_at_least_every_thousand_calls(alone: World) -> None:
    paces = {}
    for call_s in (1e-9, 1e-5, 0.09, 30.0, 0.02, 0.0):
        alone.agreement.take_pace(call_s=call_s)
        paces[call_s] = alone.agreement.every
    assert paces == {1e-9: 1000, 1e-5: 1000, 0.09: 1, 30.0: 1, 0.02: 5, 0.0: 5}


def test_an_action_gives_each_rank_its_result_or_all_ranks_rank_0s(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        calls = list[int]()

        def action() -> str:
            calls.append(world.rank)
            return f"done by {world.rank}"

        agreement = world.agreement
        return agreement.all_or_fail(action, what=""), agreement.on_rank_0(action, what=""), agreement.to_rank_0(calls)

    both = [[0, 0], [1]]  # rank 0 alone has acted twice
    assert on_ranks(2, act, scratch=tmp_path) == [("done by 0", "done by 0", both), ("done by 1", "done by 0", [])]


def test_different_values_come_by_their_first_ranks(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        agreement = world.agreement
        before = num_operations(agreement.group)
        same = agreement.distinct([("name", 1.5)])
        return (
            same,
            num_operations(agreement.group) - before,
            agreement.distinct("ab"[world.rank % 2] * 1000 ** (world.rank % 2)),
        )

    expected = {0: [("name", 1.5)]}, 1, {0: "a", 1: "b" * 1000}  # one reduction is all that equal values need
    assert on_ranks(4, act, scratch=tmp_path) == [expected] * 4
    assert World.alone().agreement.distinct("a") == {0: "a"}


def test_rank_0_judges_what_differs_and_all_ranks_learn_the_end(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        agreement = world.agreement

        def judge(of_ranks: dict[int, int]) -> Any:
            if 7 in of_ranks.values():
                raise NoValidCheckpoint(f"seven, among {sorted(of_ranks)}")
            return sorted(of_ranks.values())

        found = [agreement.judged(1, judge), agreement.judged(world.rank, judge)]
        for value in (7, world.rank + 5):
            with pytest.raises(NoValidCheckpoint, match="seven") as end:
                agreement.judged(value, judge)
            found.append(str(end.value))
        return found

    assert on_ranks(3, act, scratch=tmp_path) == [[[1], [0, 1, 2], "seven, among [0]", "seven, among [0, 1, 2]"]] * 3


def test_a_disk_that_refuses_one_rank_fails_all_of_them(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        def write() -> None:
            if world.rank < 2:
                raise OSError(errno.ENOSPC, f"No space left on device of {world.rank}")

        def write_on_1() -> None:
            if world.rank == 1:
                write()

        texts = []
        for run in (
            lambda: world.agreement.all_or_fail(write_on_1, what="checkpoint not written"),
            lambda: world.agreement.on_rank_0(write, what="checkpoint not written"),
        ):
            with pytest.raises(DiskFailed) as failed:
                run()
            texts.append(str(failed.value))
        return texts

    for texts in on_ranks(3, act, scratch=tmp_path):
        for rank, text in zip((1, 0), texts):
            assert "checkpoint not written" in text and f"rank {rank}" in text and f"No space left on device of {rank}" in text


def test_another_error_in_an_action_is_not_swallowed(alone: World) -> None:
    with pytest.raises(ZeroDivisionError):
        alone.agreement.all_or_fail(lambda: 1 // 0, what="not divided")


def test_a_threads_agreement_does_not_pair_with_the_first(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        beside = world.with_own_agreement().agreement
        # each rank uses the two in another order: on one group this would pair the wrong collectives
        first, second = (world.agreement, beside) if world.rank == 0 else (beside, world.agreement)
        works = [(name, torch.distributed.all_reduce(value, group=agreement.group, async_op=True), value)
                 for name, agreement, value in [("first", first, torch.tensor(1.0)), ("second", second, torch.tensor(10.0))]]  # fmt: skip
        sums = {}
        for name, work, value in works:
            work.wait()
            sums[name] = value.item()
        return sums

    # rank 0's first call pairs with rank 1's second: they are of one group
    assert on_ranks(2, act, scratch=tmp_path) == [{"first": 11.0, "second": 11.0}] * 2


def test_one_process_agrees_with_itself_at_once(alone: World) -> None:
    agreement = alone.agreement
    assert agreement.group is None and not torch.distributed.is_initialized()
    assert agreement.gather("mine") == ["mine"] and agreement.from_rank_0(3) == 3
    assert agreement.any_flags(True, False) == [True, False]
    assert agreement.sum(torch.tensor(2.0)).item() == 2.0
    assert agreement.all_or_fail(lambda: 7, what="") == agreement.on_rank_0(lambda: 7, what="") == 7
    assert agreement.to_rank_0(7) == [7] and agreement.judged(7, len) == 1
    agreement.barrier()
    agreement.finish()
