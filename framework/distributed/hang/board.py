"""A file that shows each rank of a node where the other ranks are, even a rank that no longer answers."""

import ctypes
import faulthandler
import fcntl
import mmap
import os
import signal
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

DUMP = signal.SIGRTMIN + 7  # makes a rank write its stacks; it is not a signal that stops a run
NUM_BEATS = 64  # the number of heartbeats that are kept per rank

_STACK_BYTES = 1 << 21  # enough for 100 threads of 100 frames each, which is faulthandler's limit
_VERDICT_BYTES = 1 << 16
_COLLECTIVES = [("on_default", "i8"), ("on_control", "i8")]
_BEAT = [("number", "i8"), ("step", "i8"), ("phase", "S16"), *_COLLECTIVES]
_PLACE = [("rank", "i4"), ("pid", "i4"), ("state", "i8"), ("since", "f8"), *_COLLECTIVES]
_SLOT = np.dtype([*_PLACE, ("num_beats", "i8"), ("beats", _BEAT, NUM_BEATS)])  # one rank's; the fields of RankSlot and Beat


class RankState(IntEnum):
    """A rank's report about itself."""

    ABSENT = 0  # the rank has not opened the board yet
    RUNNING = 1
    TIMED_OUT = 2  # the rank has waited for other ranks until the time-out
    LOST_PEER = 3  # the connection to a rank that this rank waited for was closed
    FAILED = 4  # because of the rank's own error


@dataclass(frozen=True)
class Beat:
    """A rank's place in the program. On all ranks the same number is the same place."""

    number: int
    step: int
    phase: str
    collectives: tuple[int, int]  # started before this beat, on the default process group and on `control`

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.step else self.phase


@dataclass(frozen=True)
class RankSlot:
    """The state of one rank."""

    local_rank: int
    rank: int
    pid: int
    state: RankState
    since: float  # seconds of the monotonic clock, which a machine's processes share; 0 without an error report
    collectives: tuple[int, int]  # started until the error report; without a report, until the latest beat
    beats: tuple[Beat, ...]  # the latest beats, oldest first

    @property
    def has_reported(self) -> bool:
        return self.state > RankState.RUNNING


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
        self._verdict_at = num_local * _SLOT.itemsize
        os.ftruncate(descriptor, self._stack_at(num_local))
        self._slots = np.frombuffer(mmap.mmap(descriptor, self._verdict_at), dtype=_SLOT)

    def close(self) -> None:
        os.close(self._descriptor)

    def everyone(self) -> list[RankSlot]:
        return [self.slot(local_rank) for local_rank in range(self.num_local)]

    def others(self) -> list[RankSlot]:
        return [self.slot(local_rank) for local_rank in range(self.num_local) if local_rank != self.local_rank]

    def slot(self, local_rank: int) -> RankSlot:
        rank, pid, state, since, *begun, total, ring = self._slots[local_rank].copy().item()
        latest = [ring[number % NUM_BEATS].item() for number in range(max(0, total - NUM_BEATS), total)]
        beats = tuple(Beat(number, step, phase.decode(), (a, b)) for number, step, phase, a, b in latest)
        collectives = (begun[0], begun[1]) if state > RankState.RUNNING or not beats else beats[-1].collectives
        if state == RankState.ABSENT:  # an absent rank's slot is empty; launchers number a node's ranks without a gap
            rank = self._first_rank + local_rank
        return RankSlot(local_rank, rank, pid, RankState(state), since, collectives, beats)

    def stack(self, local_rank: int) -> str:
        """Return the stack that a rank has written so far."""
        return _text_at(self._descriptor, self._stack_at(local_rank), _STACK_BYTES)

    def _stack_at(self, local_rank: int) -> int:
        return self._verdict_at + _VERDICT_BYTES + local_rank * _STACK_BYTES

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
        text = verdict.encode()[: _VERDICT_BYTES - 1]
        os.pwrite(self._descriptor, text[1:], self._verdict_at + 1)
        os.pwrite(self._descriptor, text[:1], self._verdict_at)  # write the first byte last: before it, the verdict is empty

    @property
    def verdict(self) -> str:
        """The leader's verdict, or an empty string."""
        return _text_at(self._descriptor, self._verdict_at, _VERDICT_BYTES)


class Board(BoardView):
    """This rank's own slot, which it writes, and the slots of the others. A write takes microseconds and no system call."""

    def __init__(self, path: Path, *, rank: int, local_rank: int, num_local: int) -> None:
        self.local_rank = local_rank
        self._number = 0
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._set_up(descriptor, first_rank=rank - local_rank, num_local=num_local)
        # on a full disk, a write to memory without a page is fatal; this call raises an error instead
        os.posix_fallocate(descriptor, local_rank * _SLOT.itemsize, _SLOT.itemsize)
        self._mine = self._slots[local_rank]
        # the handler is in C: it also works if a loop in C never returns to Python
        self._stack = open(path, "r+b", buffering=0)
        self._stack.seek(self._stack_at(local_rank))
        faulthandler.register(DUMP, file=self._stack, all_threads=True)
        self._mine["rank"], self._mine["pid"], self._mine["state"] = rank, os.getpid(), RankState.RUNNING

    def close(self) -> None:
        faulthandler.unregister(DUMP)
        self._stack.close()
        super().close()

    def beat(self, phase: str, *, step: int, collectives: tuple[int, int]) -> None:
        """Record that this rank starts `phase` (at most 16 characters) of a step."""
        self._mine["beats"][self._number % NUM_BEATS] = (self._number, step, phase.encode(), *collectives)
        self._number += 1
        self._mine["num_beats"] = self._number

    def report(self, state: RankState, *, stack: str, collectives: tuple[int, int]) -> None:
        """Record how this rank's work has ended, and where."""
        if not self.stack(self.local_rank):
            os.pwrite(self._descriptor, stack.encode()[: _STACK_BYTES - 1], self._stack_at(self.local_rank))
        self._mine["since"] = time.monotonic()
        self._mine["on_default"], self._mine["on_control"] = collectives
        self._mine["state"] = state  # write the state last: then the others read the rest

    @property
    def mine(self) -> RankSlot:
        return self.slot(self.local_rank)


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
            return _text_at(file.fileno(), num_local * _SLOT.itemsize, _VERDICT_BYTES)
    except FileNotFoundError:
        return ""


def _text_at(descriptor: int, at: int, size: int) -> str:
    return os.pread(descriptor, size, at).partition(b"\0")[0].decode(errors="replace")
