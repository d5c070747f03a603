"""The timetable of a pipeline: from torch's own schedules, each micro-batch through each stage once, nothing before its input."""

from collections import Counter
from typing import get_args

import pytest

from framework.parallel.pipelining.schedules import ScheduleName, order_of, owners
from framework.parallel.pipelining.timetable import Placed, timetable, waiting_in

SIZES = [(1, 3), (2, 2), (2, 7), (3, 1), (4, 8), (4, 12)]


def table(name: str, num_ranks: int, num_micro_batches: int) -> dict[int, list[Placed]]:
    return timetable(order_of(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches)[0])


@pytest.mark.parametrize(("num_ranks", "count"), SIZES)
@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_each_micro_batch_goes_through_each_stage_once_and_nothing_precedes_its_input(
    name: str, num_ranks: int, count: int
) -> None:
    require_a_whole_pass(table(name, num_ranks, count), owned=owners(name, num_ranks=num_ranks), count=count)


def require_a_whole_pass(rows: dict[int, list[Placed]], *, owned: list[int], count: int) -> None:
    num_ranks = len({*owned})
    assert [*rows] == [*range(num_ranks)]
    done: dict[tuple[str, int, int], Placed] = {}
    for rank, row in rows.items():
        assert all(before.end <= after.start for before, after in zip(row, row[1:]))  # one at a time
        assert {owned[action.stage] for action in row} == {rank}
        for action in row:
            kinds = ("BACKWARD_INPUT", "BACKWARD_WEIGHT") if action.kind == "FULL_BACKWARD" else (action.kind,)
            for kind in kinds:
                assert (kind, action.stage, action.micro_batch) not in done
                done[kind, action.stage, action.micro_batch] = action
    assert Counter(kind for kind, _, _ in done) == dict.fromkeys(
        ("FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"), len(owned) * count
    )
    for (kind, stage, number), action in done.items():
        needed = {"FORWARD": [("FORWARD", stage - 1, number)] if stage else [],
                  "BACKWARD_INPUT": [("FORWARD", stage, number)] + [("BACKWARD_INPUT", stage + 1, number)] * (stage + 1 < len(owned)),
                  "BACKWARD_WEIGHT": [("BACKWARD_INPUT", stage, number)]}  # fmt: skip
        assert all(done[key] is action or done[key].end <= action.start for key in needed[kind]), (kind, stage, number)


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 2), (3, 4), (4, 8), (4, 13)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b_is_that_of_their_papers(name: str, p: int, m: int) -> None:
    assert waiting_in(table(name, p, m)) == pytest.approx((p - 1) / (m + p - 1))


def test_1f1b_keeps_no_more_micro_batches_under_way_than_stages_behind_and_gpipe_keeps_all() -> None:
    for name, most in (("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])):
        for rank, row in table(name, 4, 8).items():
            under_way = [0]
            for action in row:
                under_way.append(under_way[-1] + (1 if action.kind == "FORWARD" else -1))
            assert max(under_way) == most[rank]


def test_two_stages_a_process_and_split_backward_passes_wait_less() -> None:
    plain, interleaved, split = (waiting_in(table(name, 4, 8)) for name in ("1f1b", "interleaved", "zbv"))
    assert split < interleaved < plain
