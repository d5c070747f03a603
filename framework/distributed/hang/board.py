"""A file with the heartbeats of a node's ranks: it shows where each rank is, even a rank that no longer answers."""

import ctypes
import faulthandler
import fcntl
import os
import signal
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

DUMP = signal.SIGRTMIN + 7  # makes a rank write its stacks; it is not a signal that stops a run

_STACK_BYTES = 1 << 21  # enough for 100 threads of 100 frames each, which is faulthandler's limit
_VERDICT_BYTES = 1 << 16
_SLOT = struct.Struct("=iiqddqq16s")  # the fields of RankSlot after the first


class RankState(IntEnum):
    """A rank's report about itself."""

    ABSENT = 0  # the rank has not opened the board yet
    RUNNING = 1
    TIMED_OUT = 2  # the rank has waited for other ranks until the time-out
    LOST_PEER = 3  # the connection to a rank that this rank waited for was closed
    FAILED = 4  # because of the rank's own error


class RankSlot(NamedTuple):
    """The state of one rank, and its latest heartbeat. On all ranks the same number of heartbeats is the same place."""

    local_rank: int
    rank: int
    pid: int
    state: RankState
    since: float  # of its report: seconds of the monotonic clock, which a machine's processes share; 0 without a report
    beat_at: float  # of its latest heartbeat, or its start
    num_beats: int
    step: int
    phase: str

    @property
    def has_reported(self) -> bool:
        return self.state > RankState.RUNNING

    @property
    def place(self) -> str:
        if not self.num_beats:
            return "at its start"
        return f"in step {self.step} ({self.phase})" if self.step else f"in {self.phase}"


class BoardView:
    """The slots of a node's ranks, as any process of the node sees them.

    The file contains the slots, the verdict, and space for a stack of each rank. Once every rank has opened the file, the file
    may be deleted.
    """

    local_rank = -1  # the number for a process that is not a rank

    def __init__(self, path: Path, *, first_rank: int, num_local: int) -> None:
        """Open the board. Raise FileNotFoundError if no rank has made the file. `first_rank` is the rank of local rank 0."""
        self._set_up(os.open(path, os.O_RDWR), first_rank=first_rank, num_local=num_local)

    def _set_up(self, descriptor: int, *, first_rank: int, num_local: int) -> None:
        self.num_local, self.leads = num_local, False
        self._first_rank, self._descriptor = first_rank, descriptor
        os.ftruncate(descriptor, _stack_at(num_local, num_local))

    def close(self) -> None:
        os.close(self._descriptor)

    def everyone(self) -> list[RankSlot]:
        return [self.slot(local_rank) for local_rank in range(self.num_local)]

    def others(self) -> list[RankSlot]:
        return [self.slot(local_rank) for local_rank in range(self.num_local) if local_rank != self.local_rank]

    def slot(self, local_rank: int) -> RankSlot:
        fields = _SLOT.unpack(os.pread(self._descriptor, _SLOT.size, local_rank * _SLOT.size))
        rank, pid, state, since, beat_at, num_beats, step, phase = fields
        if state == RankState.ABSENT:  # an absent rank's slot is empty; launchers number a node's ranks without a gap
            rank = self._first_rank + local_rank
        text = phase.rstrip(b"\0").decode()
        return RankSlot(local_rank, rank, pid, RankState(state), since, beat_at, num_beats, step, text)

    def stack(self, local_rank: int) -> str:
        """Return the stack that a rank has written so far."""
        return _text_at(self._descriptor, _stack_at(local_rank, self.num_local), _STACK_BYTES)

    def try_lead(self) -> bool:
        """Try to become the leader, which finds the verdict. Fail if a living process leads, or if the verdict is known."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.leads = not self.verdict
        return self.leads

    def stop_leading(self) -> None:
        self.leads = False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def post(self, verdict: str) -> None:
        text, at = verdict.encode()[: _VERDICT_BYTES - 1], self.num_local * _SLOT.size
        os.pwrite(self._descriptor, text[1:], at + 1)
        os.pwrite(self._descriptor, text[:1], at)  # write the first byte last: before it, the verdict is empty

    @property
    def verdict(self) -> str:
        """The leader's verdict, or an empty string."""
        return _text_at(self._descriptor, self.num_local * _SLOT.size, _VERDICT_BYTES)


class Board(BoardView):
    """This rank's own slot, which it writes, and the slots of the others. A heartbeat takes two microseconds."""

    def __init__(self, path: Path, *, rank: int, local_rank: int, num_local: int) -> None:
        self.local_rank = local_rank
        self._set_up(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), first_rank=rank - local_rank, num_local=num_local)
        # the handler is in C: it also works if a loop in C never returns to Python
        self._stack = open(path, "r+b", buffering=0)
        self._stack.seek(_stack_at(local_rank, num_local))
        faulthandler.register(DUMP, file=self._stack, all_threads=True)
        self.mine = RankSlot(local_rank, rank, os.getpid(), RankState.RUNNING, 0.0, time.monotonic(), 0, 0, "")
        self._write()

    def close(self) -> None:
        faulthandler.unregister(DUMP)
        self._stack.close()
        super().close()

    def beat(self, phase: str, *, step: int) -> None:
        """Record that this rank starts `phase` (at most 16 characters) of a step."""
        self.mine = self.mine._replace(beat_at=time.monotonic(), num_beats=self.mine.num_beats + 1, step=step, phase=phase)
        self._write()

    def report(self, state: RankState, *, stack: str) -> None:
        """Record how this rank's work has ended, and where."""
        if not self.stack(self.local_rank):
            at = _stack_at(self.local_rank, self.num_local)
            os.pwrite(self._descriptor, stack.encode()[: _STACK_BYTES - 1], at)
        self.mine = self.mine._replace(since=time.monotonic(), state=state)
        self._write()

    def _write(self) -> None:
        *_, phase = fields = self.mine[1:]
        os.pwrite(self._descriptor, _SLOT.pack(*fields[:-1], phase.encode()), self.local_rank * _SLOT.size)


def _stack_at(local_rank: int, num_local: int) -> int:
    return num_local * _SLOT.size + _VERDICT_BYTES + local_rank * _STACK_BYTES


def request_stacks(pid: int) -> None:
    """Make a rank write its current stacks. Then a stopped rank continues.

    The signal goes to the main thread of the rank. Another thread would write only after the main thread had continued.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):  # since glibc 2.30
        libc.tgkill(pid, pid, DUMP)
    else:
        os.kill(pid, DUMP)
    os.kill(pid, signal.SIGCONT)


def posted_verdict(path: Path, *, num_local: int) -> str:
    """Return the verdict on the board at `path`, or an empty string if there is none. For a process that is not a rank."""
    try:
        with open(path, "rb", buffering=0) as file:
            return _text_at(file.fileno(), num_local * _SLOT.size, _VERDICT_BYTES)
    except FileNotFoundError:
        return ""


def _text_at(descriptor: int, at: int, size: int) -> str:
    return os.pread(descriptor, size, at).partition(b"\0")[0].decode(errors="replace")
