"""The order of PipeDream's steps: each micro-batch through each stage once, and a bubble only where it fills and drains."""

import pytest

from extras.pipedream.pipedream import DRAIN_EVERY, num_due, order_of_steps
from framework.cli.plan_pipeline import planned_pipeline
from framework.parallel.pipelining.timetable import timetable, waiting_in
from tests.parallel.test_timetable import SIZES, require_a_whole_pass
from tests.test_draw import GPT, build


@pytest.mark.parametrize(("num_ranks", "count"), SIZES)
def test_each_micro_batch_goes_through_each_stage_once_and_nothing_precedes_its_input(num_ranks: int, count: int) -> None:
    order = order_of_steps(5, num_ranks=num_ranks, num_micro_batches=count, drain_every=DRAIN_EVERY)
    require_a_whole_pass(timetable(order), owned=[*range(num_ranks)], count=5 * count)


def test_it_waits_only_where_it_fills_and_drains() -> None:
    def waiting(drain_every: int) -> float:
        order = order_of_steps(40, num_ranks=4, num_micro_batches=1, drain_every=drain_every)
        return waiting_in(timetable(order))

    # drained in every step it is GPipe of one micro-batch
    assert waiting(40) < waiting(10) < waiting(1) == pytest.approx(3 / 4)


def test_a_stage_holds_as_many_batches_as_stages_behind_it() -> None:
    assert [num_due(2, delay=3, is_drained=False), num_due(4, delay=3, is_drained=False)] == [0, 1]
    assert num_due(3, delay=3, is_drained=True) == 3


def test_the_plan_draws_its_steps() -> None:
    line = [*GPT, "parallel=pipeline", "parallel.schedule=pipedream", "launch.nproc_per_node=4", "global_batch_size=32",
            "micro_batch_size=4", "trainer.eval_every=50", "checkpoint.every=50"]  # fmt: skip
    plan = planned_pipeline(build(*line))
    assert (plan.num_micro_batches, [*plan.placed]) == (8, [0, 1, 2, 3])
    assert 0 < plan.waiting < 3 / (8 * 50)  # it fills and drains once in 50 steps
    assert "pipedream: 4 stages" in plan.lines()[0] and "50 steps" in plan.lines()[1]
