"""The order in which the stages of a pipeline work: torch's schedules by name, and the share of time spent waiting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch.distributed import pipelining

from framework.runtime.torch_internals import actions_of

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
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    if isinstance(schedule, PipelineScheduleSingle):  # GPipe and 1F1B: Huang et al. 2019, Narayanan et al. 2021
        return (num_ranks - 1) / (num_micro_batches + num_ranks - 1)
    return waiting_in(timetable(actions_of(schedule)))


# --- the time of each action, if all stages cost the same


Action = tuple[str, int, int]  # the kind of computation, by torch's name, the stage and the micro-batch

TIMES = {"FORWARD": 1, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1, "FULL_BACKWARD": 2}  # the usual proportions


class Placed(NamedTuple):
    """An action with its time, in units of a stage's forward pass."""

    kind: str
    stage: int
    micro_batch: int
    start: int
    end: int


def timetable(order: Mapping[int, Sequence[Action]]) -> dict[int, list[Placed]]:
    """Return when each process runs its actions; sending takes no time. Actions that compute nothing are left out.

    A forward waits for the stage before it, a backward for the stage after it, and both for earlier actions of their process.
    """
    rows = {rank: [action for action in row if action[0] in TIMES] for rank, row in order.items()}
    placed: dict[int, list[Placed]] = {rank: [] for rank in rows}
    last_stage = max(stage for row in rows.values() for _, stage, _ in row)
    ready: dict[Action, int] = {}  # when an activation or a gradient is available
    clocks = dict.fromkeys(rows, 0)
    while any(rows.values()):
        left = sum(map(len, rows.values()))
        for rank, row in rows.items():
            while row:
                kind, stage, number = row[0]
                is_forward, is_weight = kind == "FORWARD", kind == "BACKWARD_WEIGHT"
                needs_nothing = is_weight or (stage == 0 if is_forward else stage == last_stage)
                needed = ("F", stage - 1, number) if is_forward else ("B", stage + 1, number)
                if not needs_nothing and needed not in ready:
                    break
                start = max(clocks[rank], 0 if needs_nothing else ready[needed])
                clocks[rank] = start + TIMES[kind]
                placed[rank].append(Placed(kind, stage, number, start, clocks[rank]))
                if not is_weight:
                    ready["F" if is_forward else "B", stage, number] = clocks[rank]
                row.pop(0)
        assert sum(map(len, rows.values())) < left, "the order waits for itself"
    return placed


def waiting_in(placed: Mapping[int, Sequence[Placed]]) -> float:
    """Return the share of the time in which a process waits for others (the bubble)."""
    busy = sum(action.end - action.start for row in placed.values() for action in row)
    return 1 - busy / (len(placed) * max(row[-1].end for row in placed.values()))
