"""Who hangs: when a collective's time is up, the ranks of a node agree which of them the others wait for."""

import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from framework.distributed.hang.board import Board, RankSlot, State, request_stacks
from framework.distributed.hang.judge import RankReport, judge, waits_for_others
from framework.runtime import log
from framework.runtime.exits import is_lost_peer, is_timeout

_TO_TELL_S = 1.5  # between the first rank whose time is up and the last that waits like it
_TO_DUMP_S = 1.5
_TO_LOSE_S = 2.0  # between a connection that breaks and the end of the process at its other end
_LATE_S = 0.5
_SETTLED_S = 0.2  # a stack that has not grown for so long is complete


def report_error(board: Board, error: Exception, *, collectives: tuple[int, int] | None = None) -> None:
    """Write on the board how this rank's work has ended; `collectives`: begun so far. What it tells first, counts."""
    state = State.TIMED_OUT if is_timeout(error) else State.LOST_PEER if is_lost_peer(error) else State.FAILED
    if board.mine.state is State.RUNNING:
        stack = "".join(traceback.format_exception(error))
        board.tell(state, stack=stack, collectives=collectives or board.mine.collectives)


def settle(board: Board, *, timeout_s: float, spans_nodes: bool) -> str:
    """Return who hangs, if what this rank has told is part of a hang; an empty string if it is an ordinary error.

    Every rank that has told its error calls this. The first whose time is up finds out: it has the silent ones write
    their stacks, puts all stacks into the log, and posts the verdict, for which the others wait. It leads from then on.
    """
    if not _is_part_of_a_hang(board):
        return ""
    while not board.verdict:
        if board.try_lead() and not _lead(board, timeout_s=timeout_s, spans_nodes=spans_nodes):
            board.stop_leading()  # so that the next finds the same
            return ""
        time.sleep(0.02)
    return board.verdict


def kill_silent(board: Board) -> None:
    """Kill the ranks of this node that have told nothing: they will not end by themselves."""
    for place in board.others():
        if place.pid and not _has_told(place):
            with suppress(ProcessLookupError):
                os.kill(place.pid, signal.SIGKILL)


def _is_part_of_a_hang(board: Board) -> bool:
    if board.mine.state is not State.LOST_PEER:
        return board.mine.state is State.TIMED_OUT
    # gloo has a rank whose time is up close its connections: was it that, or has the peer ended?
    _wait(lambda: _has_ended(board) or _has_timed_out(board), at_most_s=_TO_LOSE_S)
    return _has_timed_out(board)


def _has_timed_out(board: Board) -> bool:
    return any(place.state is State.TIMED_OUT for place in board.others())


def _has_ended(board: Board) -> bool:
    return any(place.state is State.FAILED or _is_gone(place) for place in board.others())


def _is_gone(place: RankSlot) -> bool:
    return place.state is not State.ABSENT and _process(place.pid).state in ("", "Z", "X")


@dataclass(frozen=True)
class _Process:
    """What the kernel says of a process."""

    state: str  # a letter of /proc/PID/stat: T is stopped, Z a corpse; empty where there is no such process
    busy_s: float  # on a CPU; and, of its first thread, waiting for one, where the kernel counts that


def _process(pid: int) -> _Process:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return _Process("", 0.0)
    waited_s = 0.0
    with suppress(OSError), open(f"/proc/{pid}/schedstat") as file:
        waited_s = int(file.read().split()[1]) / 1e9
    return _Process(fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + waited_s)


def _lead(board: Board, *, timeout_s: float, spans_nodes: bool) -> bool:
    """Find out who hangs, log it and post it. Returns False if a rank has merely ended."""
    begun, busy_s = time.monotonic(), {place.local_rank: _process(place.pid).busy_s for place in board.others()}
    _wait(lambda: _has_ended(board) or all(_has_told(p) or _is_stopped(p) for p in board.others()), at_most_s=_TO_TELL_S)
    if _has_ended(board):
        return False
    silent = {place.local_rank: place for place in board.others() if not _has_told(place)}
    stopped = [local_rank for local_rank, place in silent.items() if _is_stopped(place)]
    _dump(board, silent)
    elapsed_s = time.monotonic() - begun
    seen = []
    for local_rank in range(board.num_local):
        # not as it is by now: one that was stopped goes on until it is killed
        place, stack = silent.get(local_rank, board.place(local_rank)), board.stack(local_rank)
        if local_rank in stopped:
            manner = "is stopped (by SIGSTOP, or a debugger)"
        elif local_rank in silent:
            share = (_process(place.pid).busy_s - busy_s[local_rank]) / elapsed_s
            manner = _manner(place, stack, computes=share > 0.5)
        else:
            manner = _lateness(place, board)
        seen.append(RankReport(place, stack, manner))
    verdict = judge(seen, timeout_s=timeout_s, spans_nodes=spans_nodes)
    for one in seen:
        log.to_files(f"rank {one.place.rank} {one.manner or 'waits for other ranks'}, {one}\n{one.stack or '(no stack)'}")
    board.post(verdict)
    return True


def _lateness(place: RankSlot, board: Board) -> str:
    """Return by how much a rank came late. One that waits loses its connections in the moment in which another gives up."""
    gave_up = [p.since for p in board.others() + [board.mine] if p.state is State.TIMED_OUT and p.since <= place.since]
    if place.state is State.LOST_PEER and gave_up and place.since - max(gave_up) > _LATE_S:
        return f"came {place.since - max(gave_up):.1f} seconds after the others had given up"
    return ""


def _has_told(place: RankSlot) -> bool:
    return place.state > State.RUNNING


def _is_stopped(place: RankSlot) -> bool:
    return _process(place.pid).state in ("T", "t")


def _manner(place: RankSlot, stack: str, *, computes: bool) -> str:
    if place.state is State.ABSENT:
        return "has not come so far as to say where it is"
    if _process(place.pid).state == "D":
        return "is in a system call that does not end (a disk or a network file system)"
    if computes:
        return "computes: it loops, or is slow"
    return "" if waits_for_others(stack) else "waits, but not for the other ranks"


def _dump(board: Board, silent: dict[int, RankSlot]) -> None:
    """Have the silent ranks write their stacks, and wait until they are written."""
    for place in silent.values():
        if place.pid:
            with suppress(ProcessLookupError):
                request_stacks(place.pid)
    deadline = time.monotonic() + _TO_DUMP_S
    asked = [local_rank for local_rank, place in silent.items() if place.pid]
    before = [""]
    while time.monotonic() < deadline:
        now = [board.stack(local_rank) for local_rank in asked]
        if now == before and all(now):
            return
        before = now
        time.sleep(_SETTLED_S)


def _wait(condition: Callable[[], bool], *, at_most_s: float) -> None:
    deadline = time.monotonic() + at_most_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
