"""The time at which each process of a pipeline runs each action, if all stages cost the same."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
