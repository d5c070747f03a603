"""The timetable of a pipeline: from torch's own schedules, each micro-batch through each stage once, nothing before its input."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from framework.parallel.pipelining.schedules import KINDS, Placed, ScheduleName, make_schedule, owners, timetable, waiting_share
from framework.runtime.torch_internals import actions_of

SIZES = [(1, 3), (2, 2), (2, 7), (3, 1), (4, 8), (4, 12)]
SEVERAL = [name for name in get_args(ScheduleName) if KINDS[name].stages_per_rank > 1]


def schedule(name: str, num_ranks: int, num_micro_batches: int) -> Any:
    owned = owners(name, num_ranks=num_ranks)
    stages = [SimpleNamespace(stage_index=number, num_stages=len(owned), group_rank=0, group_size=num_ranks, has_backward=True, submod=None,
                              is_first=number == 0, is_last=number == len(owned) - 1, device=torch.device("cpu"))
              for number, owner in enumerate(owned) if owner == 0]  # fmt: skip
    return make_schedule(name, stages, num_micro_batches=num_micro_batches)[0]


@pytest.mark.parametrize(("num_ranks", "count"), SIZES)
@pytest.mark.parametrize("name", SEVERAL)
def test_each_micro_batch_goes_through_each_stage_once_and_nothing_precedes_its_input(
    name: str, num_ranks: int, count: int
) -> None:
    rows = timetable(actions_of(schedule(name, num_ranks, count)))
    require_a_whole_pass(rows, owned=owners(name, num_ranks=num_ranks), count=count)


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


def test_two_stages_a_process_and_split_backward_passes_wait_less() -> None:
    plain, interleaved, split = (waiting_share(schedule(name, 4, 8), num_micro_batches=8, num_ranks=4)
                                 for name in ("1f1b", "interleaved", "zbv"))  # fmt: skip
    assert split < interleaved < plain == pytest.approx(3 / 11)
    assert split == pytest.approx(3 / 51)
