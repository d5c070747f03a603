"""The order in which the stages of a pipeline work: torch's schedules by name, and the share of time spent waiting."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed import pipelining

from framework.parallel.pipelining.timetable import timetable, waiting_in
from framework.runtime.torch_internals import actions_of, is_single_stage

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]
Balance = Literal["operations"]  # stages of equal cost, by counted operations: the only way so far


@dataclass(frozen=True)
class Kind:
    """One of torch's schedules, and the stages that a process has with it."""

    made_by: Any
    stages_per_rank: int
    otherwise: Any  # the schedule for numbers of micro-batches that `made_by` refuses
    asks: str = ""  # the rule for this number, for a message
    has_v: bool = False  # the second half of the stages is in reverse order: the first process also has the last stage


_ROUNDS = "a multiple of the processes, or fewer"
KINDS: dict[str, Kind] = {
    "gpipe": Kind(pipelining.ScheduleGPipe, 1, pipelining.ScheduleGPipe),
    "1f1b": Kind(pipelining.Schedule1F1B, 1, pipelining.ScheduleGPipe),
    "interleaved": Kind(pipelining.ScheduleInterleaved1F1B, 2, pipelining.ScheduleLoopedBFS, asks=_ROUNDS),
    "zero-bubble": Kind(pipelining.ScheduleInterleavedZeroBubble, 2, pipelining.ScheduleLoopedBFS, asks=_ROUNDS),
    # Qi et al. 2023, "Zero bubble pipeline parallelism", section 6
    "zbv": Kind(pipelining.ScheduleZBVZeroBubble, 2, pipelining.ScheduleZBVZeroBubble, has_v=True),
    # DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1, without its mirrored copy of the weights
    "dualpipev": Kind(
        pipelining.ScheduleDualPipeV, 2, pipelining.ScheduleZBVZeroBubble, asks="at least as many as stages", has_v=True
    ),
}


def owners(name: str, *, num_ranks: int) -> list[int]:
    """Return the process of the pipeline that has each stage."""
    ranks = [*range(num_ranks)]
    return ranks + ranks[::-1] if KINDS[name].has_v else ranks * KINDS[name].stages_per_rank


def make_schedule(name: str, stages: Sequence[Any], *, num_micro_batches: int) -> tuple[Any, str]:
    """Return a schedule, and if it is not the named one, the named one's rule. The last stage must return the loss.

    It is the simple schedule of its kind if the named one cannot run this number of micro-batches: fewer than the stages, or
    not a multiple of its rounds. (An epoch's short micro-batch runs alone.)
    """
    kind = KINDS[name]
    given: Any = stages[0] if kind.stages_per_rank == 1 else [*stages]
    options: Any = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
    try:
        return kind.made_by(given, num_micro_batches, **options), ""
    except ValueError:
        return kind.otherwise(given, num_micro_batches, **options), kind.asks


def waiting_share(schedule: Any, *, num_micro_batches: int, num_ranks: int) -> float:
    """Return the share of a pass in which a process waits for others (the bubble), if all stages cost the same."""
    if is_single_stage(schedule):  # GPipe and 1F1B: Huang et al. 2019, Narayanan et al. 2021
        return (num_ranks - 1) / (num_micro_batches + num_ranks - 1)
    return waiting_in(timetable(actions_of(schedule)))
