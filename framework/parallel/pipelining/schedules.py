"""In which order the stages of a pipeline work: torch's schedules by name, and the share of time that is spent waiting."""

from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed import pipelining

from framework.runtime.torch_internals import actions_of, gpipe, is_single_stage

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]


@dataclass(frozen=True)
class Kind:
    """One of torch's schedules, and which stages a process has under it."""

    made_by: Any
    stages_per_rank: int
    otherwise: Any  # the schedule for numbers of micro-batches that it refuses
    asks: str = ""  # of that number
    has_v: bool = False  # the second half of the stages on the processes in reverse: the first process has also the last stage


_ROUNDS = "a multiple of the processes, or fewer"
KINDS: dict[str, Kind] = {
    "gpipe": Kind(gpipe, 1, gpipe),
    "1f1b": Kind(pipelining.Schedule1F1B, 1, gpipe),
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
    """Return which of the pipeline's processes has each stage."""
    ranks = [*range(num_ranks)]
    return ranks + ranks[::-1] if KINDS[name].has_v else ranks * KINDS[name].stages_per_rank


def make_schedule(name: str, stages: list[pipelining.PipelineStage], *, num_micro_batches: int) -> tuple[Any, str]:
    """Return the schedule, for stages of which the last returns the loss; and what it asks for, if it is not the named one.

    It is the plain schedule of its kind if the named one cannot run this number of micro-batches: fewer than stages, or no
    multiple of its rounds. (An epoch's short micro-batch comes alone.)
    """
    kind = KINDS[name]
    given: Any = stages[0] if kind.stages_per_rank == 1 else stages
    options: Any = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
    try:
        return kind.made_by(given, num_micro_batches, **options), ""
    except ValueError:
        return kind.otherwise(given, num_micro_batches, **options), kind.asks


def waiting_share(schedule: Any, *, num_micro_batches: int, num_ranks: int) -> float:
    """Return the share of a pass in which a process waits for others (the bubble), if all stages cost the same."""
    if is_single_stage(schedule):  # GPipe and 1F1B: Huang et al. 2019, Narayanan et al. 2021
        return (num_ranks - 1) / (num_micro_batches + num_ranks - 1)
    return simulated_waiting(actions_of(schedule))


_TIMES = {"FORWARD": 1, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1, "FULL_BACKWARD": 2}  # the usual proportions


def simulated_waiting(order: dict[int, list[tuple[str, int, int]]]) -> float:
    """Simulate an order and return the share of waiting; sending costs nothing.

    `order` has each process's actions, as torch's schedules of several stages list them (Schedule1F1B lists other actions
    than it runs: its last process begins with the second micro-batch).
    """
    rows = {rank: [action for action in row if action[0] in _TIMES] for rank, row in order.items()}
    last_stage = max(stage for row in rows.values() for _, stage, _ in row)
    ready: dict[tuple[str, int, int], int] = {}  # when an activation or a gradient is there
    clocks, busy = dict.fromkeys(rows, 0), 0
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
                clocks[rank] = max(clocks[rank], 0 if needs_nothing else ready[needed]) + _TIMES[kind]
                busy += _TIMES[kind]
                if not is_weight:
                    ready["F" if is_forward else "B", stage, number] = clocks[rank]
                row.pop(0)
        assert sum(map(len, rows.values())) < left, "the order waits for itself"
    return 1 - busy / (len(rows) * max(clocks.values()))
