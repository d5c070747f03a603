"""The diagnosis of a hang: when a collective times out, the ranks of a node agree which rank the others wait for."""

import itertools
import os
import re
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from framework.distributed.hang.board import Board, OwnBoard, RankSlot, RankState, request_stacks, writing_children
from framework.runtime import log
from framework.runtime.exits import is_lost_peer, is_own_code, is_timeout
from framework.runtime.forks import busy_s, comes_true, cpu_use, repeating, status_of
from framework.runtime.torch_internals import BACKWARD_FUNCTION

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def frames(text: str, *, thread: int = -1) -> list[Frame]:
    """Return the frames of the main thread, or of the only thread in a traceback, innermost frame first."""
    threads = _threads(text)
    found = re.findall(r'File "(.+)", line (\d+),? in (.+)', threads[thread])  # the main thread, the oldest thread, comes last
    in_order = [Frame(file, int(line), function) for file, line, function in found]
    return in_order if len(threads) > 1 else in_order[::-1]


def _threads(text: str) -> list[str]:
    return re.split(r"^(?:Current t|T)hread 0x", text, flags=re.MULTILINE)


def own_frame(text: str, *, anywhere: bool = False) -> Frame | None:
    """Return the innermost frame that is not in a library.

    `anywhere`: if the main thread is in the framework's code, prefer the user's in another thread or a loader process.
    """
    mine = next((frame for frame in frames(text) if not frame.file.startswith((*_LIBRARIES, "<"))), None)
    if not anywhere or mine is None or is_own_code(mine.file):
        return mine
    others = (frame for number in reversed(range(len(_threads(text)) - 1)) for frame in frames(text, thread=number))
    return next((frame for frame in others if is_own_code(frame.file)), mine)


class RankReport(NamedTuple):
    """A rank's place in the program, and its activity."""

    slot: RankSlot
    stack: str
    manner: str  # what the rank does instead of waiting for other ranks; empty if it waits

    def __str__(self) -> str:
        frame = own_frame(self.stack, anywhere=bool(self.manner))
        return self.slot.place if frame is None else f"{self.slot.place}, at {frame}"


def judge(seen: Sequence[RankReport], *, timeout_s: float, spans_nodes: bool) -> str:
    """Return the verdict on the ranks of a node, in one sentence.

    The guilty rank is the rank that is not waiting for the others. If all ranks wait, but for different collectives, it is
    the rank that is ahead of the others: it has not waited for them where they wait.
    """
    guilty, waiting = [one for one in seen if one.manner], [one for one in seen if not one.manner]
    everyone = "; ".join(f"rank {one.slot.rank} {one}" for one in seen)
    waited = f"waited launch.timeout_s={timeout_s:g} seconds"
    if guilty:
        said = "; ".join(f"rank {one.slot.rank} hangs: it {one.manner}, {one}" for one in guilty)
        return "; ".join([said, *(f"rank {one.slot.rank} has {waited} {one}" for one in waiting)])
    if spans_nodes:
        return f"{_OF_OTHERS}, and all have {waited} for ranks of another node: {everyone}"
    return f"{_left_out(seen)}; all have {waited} for each other: {everyone}"


def _left_out(seen: Sequence[RankReport]) -> str:
    """Return which rank is probably wrong, if all ranks wait, but not for the same collective."""
    by_beats = sorted(seen, key=lambda one: one.slot.num_beats)
    if len(seen) > 1 and by_beats[-1].slot.num_beats > by_beats[-2].slot.num_beats:
        first = by_beats[-1].slot
        return f"rank {first.rank} hangs: it is ahead of the others, {first.place}, so it has left out a collective before"
    last = min(seen, key=lambda one: (one.slot.num_beats, one.slot.beat_at)).slot
    return f"rank {last.rank} probably hangs, because its heartbeat is the oldest, but it is not known which rank is wrong"


_OF_OTHERS = "no rank of this node hangs"


def is_of_others(verdict: str) -> bool:
    """Return whether a verdict only says that the ranks of its node have waited for ranks of another node."""
    return verdict.startswith(_OF_OTHERS)


_REPORT_S = 1.5  # from the first rank that times out to the last waiting rank that times out
_TO_DUMP_S = 1.5
_TO_LOSE_S = 2.0  # from a broken connection to the end of the process at the other end
_LATE_S = 0.5
_MOST_CHILDREN = 16  # of a rank
_SETTLED_S = 0.2  # a stack that has not grown for this time is complete


def report_error(board: OwnBoard, error: Exception) -> None:
    """Record on the board how this rank's work has ended."""
    state = RankState.TIMED_OUT if is_timeout(error) else RankState.LOST_PEER if is_lost_peer(error) else RankState.FAILED
    board.report(state, stack="".join(traceback.format_exception(error)))


def settle(board: OwnBoard, *, timeout_s: float, spans_nodes: bool) -> str:
    """Return the verdict if this rank's error is part of a hang. Return an empty string for an ordinary error.

    Every rank that has reported its error calls this.
    """
    if board.mine.state is RankState.LOST_PEER:
        # gloo closes the connections of a rank that has timed out: find out if it was a time-out or the end of the peer
        comes_true(lambda: _has_ended(board) or _has_timed_out(board), within_s=_TO_LOSE_S)
    is_part = board.mine.state is RankState.TIMED_OUT or (board.mine.state is RankState.LOST_PEER and _has_timed_out(board))
    return look(board, timeout_s=timeout_s, spans_nodes=spans_nodes) if is_part else ""


def look(board: Board, *, timeout_s: float, spans_nodes: bool) -> str:
    """Return which rank of this node hangs. Return an empty string if a rank has ended: this is not a hang.

    The first process that calls this finds the verdict: it makes the silent ranks write their stacks, writes all stacks into
    the log, and posts the verdict. The other processes wait for the verdict. A process that is not a rank calls this if no
    rank can find the verdict, or if ranks of another node wait for this node.
    """
    with board.alone():
        if not board.verdict:
            _judge_all(board, timeout_s=timeout_s, spans_nodes=spans_nodes)
        return board.verdict  # empty: the next process finds the same result


def kill_silent(board: Board) -> None:
    """Kill the ranks of this node that have reported nothing, because they will not end by themselves."""
    for slot in board.others():
        if slot.pid and not slot.has_reported:
            with suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGKILL)


def _has_timed_out(board: Board) -> bool:
    return any(slot.state is RankState.TIMED_OUT for slot in board.others())


def _has_ended(board: Board) -> bool:
    started = [slot for slot in board.others() if slot.state is not RankState.ABSENT]
    return any(slot.state is RankState.FAILED or status_of(slot.pid) in ("", "zombie", "dead") for slot in started)


def _is_stopped(slot: RankSlot) -> bool:
    return status_of(slot.pid) in ("stopped", "tracing-stop")


def _judge_all(board: Board, *, timeout_s: float, spans_nodes: bool) -> None:
    """Find the rank that hangs, log it and post the verdict; do nothing if a rank has ended: then no rank hangs."""
    started_at, used = time.monotonic(), {slot.local_rank: cpu_use(slot.pid) for slot in board.others()}
    comes_true(lambda: _has_ended(board) or all(s.has_reported or _is_stopped(s) for s in board.others()), within_s=_REPORT_S)
    if _has_ended(board):
        return
    gave_up = [slot.since for slot in board.everyone() if slot.state is RankState.TIMED_OUT]
    silent = {slot.local_rank: slot for slot in board.others() if not slot.has_reported}
    stopped = [local_rank for local_rank, slot in silent.items() if _is_stopped(slot)]
    _dump([slot for slot in silent.values() if slot.pid], board)
    elapsed_s = time.monotonic() - started_at
    seen = []
    for local_rank in range(board.num_local):
        # use a silent rank's earlier slot: a rank that was stopped continues until it is killed
        slot, stack, manner = silent.get(local_rank, board.slot(local_rank)), board.stack(local_rank), ""
        if local_rank in stopped:
            manner = "is stopped (by SIGSTOP, or a debugger)"
        elif local_rank in silent:
            busy = busy_s(used[local_rank], cpu_use(slot.pid), elapsed_s=elapsed_s)
            manner = _manner(slot, stack, computes=busy / elapsed_s > 0.5)
        elif slot.state is RankState.LOST_PEER and gave_up and (late_s := slot.since - min(gave_up)) > _LATE_S:
            manner = f"came {late_s:.1f} seconds after the others had given up"
        seen.append(RankReport(slot, stack, manner))
    verdict = judge(seen, timeout_s=timeout_s, spans_nodes=spans_nodes)
    for one in seen:
        log.to_files(f"rank {one.slot.rank} {one.manner or 'waits for other ranks'}, {one}\n{one.stack or '(no stack)'}")
    board.post(verdict)


def _manner(slot: RankSlot, stack: str, *, computes: bool) -> str:
    if slot.state is RankState.ABSENT:
        return "has not yet reported where it is"
    if status_of(slot.pid) == "disk-sleep":
        return "is in a system call that does not end (a disk or a network file system)"
    if computes:
        return "computes: it loops, or is slow"
    innermost = frames(stack)[:1]  # in the backward pass, gradients are summed
    waits_for_others = any("/torch/distributed/" in f.file or f.function == BACKWARD_FUNCTION for f in innermost)
    return "" if waits_for_others else "waits, but not for the other ranks"


def _dump(slots: list[RankSlot], board: Board) -> None:
    """Let ranks write their stacks, after those of their loader processes: one of each rank at a time."""
    children = [writing_children(slot.pid) for slot in slots]
    rounds = [(pids, _SETTLED_S / 4) for pids in itertools.islice(itertools.zip_longest(*children), _MOST_CHILDREN)]
    for processes, settled_s in (*rounds, ([slot.pid for slot in slots], _SETTLED_S)):
        asked = {slot.local_rank: pid for slot, pid in zip(slots, processes) if pid}
        before = last = {local_rank: board.stack(local_rank) for local_rank in asked}
        for pid in asked.values():
            request_stacks(pid)
        deadline = time.monotonic() + _TO_DUMP_S
        while time.monotonic() < deadline:
            time.sleep(settled_s)
            now = {local_rank: board.stack(local_rank) for local_rank in asked}
            if now == last and all(now[local_rank] != before[local_rank] for local_rank in asked):
                break
            last = now


# --- the watch over a run of one process: no other rank waits for it, so a thread notices when it makes no progress

_DEBUGGERS = ("/pdb.py", "/bdb.py")  # in a debugger, a person may need any amount of time


@contextmanager
def watched_alone(*, timeout_s: float, on_hang: Callable[[str], None]) -> Iterator[OwnBoard | None]:
    """Yield the board of the only rank. A thread calls `on_hang` with the verdict if the rank does nothing for `timeout_s`.

    Yield None if there is no folder for temporary files.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="steadfast_board_") as folder:
            board = OwnBoard(Path(folder, "board"), rank=0, local_rank=0, num_local=1)
            view = Board(Path(folder, "board"), first_rank=0, num_local=1)  # in which the rank is one of the others
    except OSError:
        yield None
        return

    def watch() -> None:
        if view.stillness_s() > timeout_s and not _is_debugged():
            on_hang(look(view, timeout_s=timeout_s, spans_nodes=False))

    try:
        with repeating(watch, every_s=1.0, name="hang"):
            yield board
    finally:
        view.close()
        board.close()


def _is_debugged() -> bool:
    stacks = map(traceback.extract_stack, sys._current_frames().values())
    return "pydevd" in sys.modules or any(frame.filename.endswith(_DEBUGGERS) for stack in stacks for frame in stack)
