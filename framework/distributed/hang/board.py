"""A file with the heartbeats of a node's ranks: it shows where each rank is, even a rank that no longer answers."""

import ctypes
import faulthandler
import fcntl
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from framework.runtime.forks import Idleness, descendants

# makes a rank write its stacks; it is not a signal that stops a run. A Mac has no real-time signals
_DUMP = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGURG
_STACK_BYTES = 1 << 21  # enough for 100 threads of 100 frames each, which is faulthandler's limit
_VERDICT_BYTES = 1 << 16
_SLOT = struct.Struct("=iqddqq16s")  # the fields of RankSlot after the first two


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
    state: RankState = RankState.ABSENT
    pid: int = 0
    since: float = 0.0  # of its report: seconds of the monotonic clock, which a machine's processes share; 0 without a report
    beat_at: float = 0.0  # of its latest heartbeat, or its start
    num_beats: int = 0
    step: int = 0
    phase: str = ""

    @property
    def has_reported(self) -> bool:
        return self.state > RankState.RUNNING

    @property
    def place(self) -> str:
        if not self.num_beats:
            return "at its start"
        return f"in step {self.step} ({self.phase})" if self.step else f"in {self.phase}"


class Board:
    """The slots of a node's ranks, the verdict, and space for a stack of each rank, as any process of the node sees them.

    Once every rank has opened the file, the file may be deleted.
    """

    mine: RankSlot | None = None  # of a rank, which writes its own slot
    has_judged = False  # whether this process has posted the verdict

    def __init__(self, path: Path, *, first_rank: int, num_local: int) -> None:
        """Open the board, or make it. `first_rank` is the rank of local rank 0."""
        self.path, self.num_local, self._first_rank = path, num_local, first_rank
        self.idleness = Idleness(counts_reads=False)  # who watches a board reads it
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._descriptor, self._stack_at(num_local))

    def close(self) -> None:
        os.close(self._descriptor)

    def everyone(self) -> list[RankSlot]:
        return [self.slot(local_rank) for local_rank in range(self.num_local)]

    def others(self) -> list[RankSlot]:
        return [slot for slot in self.everyone() if self.mine is None or slot.local_rank != self.mine.local_rank]

    def slot(self, local_rank: int) -> RankSlot:
        # launchers number a node's ranks without a gap
        state, *fields, phase = _SLOT.unpack(os.pread(self._descriptor, _SLOT.size, local_rank * _SLOT.size))
        values = local_rank, self._first_rank + local_rank, RankState(state), *fields, phase.rstrip(b"\0").decode()
        return RankSlot._make(values)

    def stillness_s(self) -> float:
        """Return for how many seconds all ranks have done nothing: no beat, no error, no use of a CPU. Call this often."""
        slots = self.everyone()
        latest = max(max(slot.beat_at, slot.since) for slot in slots)
        idle_s = self.idleness.lasts_s([slot.pid for slot in slots if slot.pid])
        return min(time.monotonic() - latest, idle_s) if latest else 0.0  # no rank has opened the board yet

    def stack(self, local_rank: int) -> str:
        """Return the stack that a rank has written so far."""
        return self._text(self._stack_at(local_rank), _STACK_BYTES)

    @property
    def verdict(self) -> str:
        """The verdict, or an empty string."""
        return self._text(self.num_local * _SLOT.size, _VERDICT_BYTES)

    def post(self, verdict: str) -> None:
        text, at = verdict.encode()[: _VERDICT_BYTES - 1], self.num_local * _SLOT.size
        os.pwrite(self._descriptor, text[1:], at + 1)
        os.pwrite(self._descriptor, text[:1], at)  # write the first byte last: before it, the verdict is empty
        self.has_judged = True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other living process is inside this context."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _text(self, at: int, size: int) -> str:
        return os.pread(self._descriptor, size, at).partition(b"\0")[0].decode(errors="replace")

    def _stack_at(self, local_rank: int) -> int:
        return self.num_local * _SLOT.size + _VERDICT_BYTES + local_rank * _STACK_BYTES


class OwnBoard(Board):
    """The board of a rank, which writes its own slot. A heartbeat takes two microseconds."""

    mine: RankSlot

    def __init__(self, path: Path, *, rank: int, local_rank: int, num_local: int) -> None:
        super().__init__(path, first_rank=rank - local_rank, num_local=num_local)
        # the handler is in C: it also works if a loop in C never returns to Python
        self._stack = open(path, "r+b", buffering=0)
        self._stack.seek(self._stack_at(local_rank))
        faulthandler.register(_DUMP, file=self._stack, all_threads=True)
        self._write(RankSlot(local_rank, rank, RankState.RUNNING, os.getpid(), beat_at=time.monotonic()))

    def close(self) -> None:
        faulthandler.unregister(_DUMP)
        self._stack.close()
        super().close()

    def beat(self, phase: str, *, step: int) -> None:
        """Record that this rank starts `phase` (at most 16 characters) of a step."""
        mine = self.mine
        self._write(mine._replace(beat_at=time.monotonic(), num_beats=mine.num_beats + 1, step=step, phase=phase))

    def report(self, state: RankState, *, stack: str) -> None:
        """Record how this rank's work has ended, and where. Only the first report counts."""
        if self.mine.has_reported:
            return
        if not self.stack(self.mine.local_rank):
            os.pwrite(self._descriptor, stack.encode()[: _STACK_BYTES - 1], self._stack_at(self.mine.local_rank))
        self._write(self.mine._replace(since=time.monotonic(), state=state))

    def _write(self, mine: RankSlot) -> None:
        self.mine = mine
        _, _, *fields, phase = mine
        os.pwrite(self._descriptor, _SLOT.pack(*fields, phase.encode()), mine.local_rank * _SLOT.size)


def writing_children(pid: int) -> list[int]:
    """Return the processes that a rank has forked and that write their stacks as it does: its loader processes."""
    return [child for child in descendants(pid) if _catches(child)]


def _catches(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/status") as file:  # another program, which the signal would end, catches none
        caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (_DUMP - 1) & 1)
    return False


def request_stacks(pid: int) -> None:
    """Make a rank write its current stacks. Then a stopped rank continues.

    The signal goes to the main thread of the rank. Another thread would write only after the main thread had continued.
    """
    with suppress(ProcessLookupError):
        library = ctypes.CDLL(None)
        if hasattr(library, "tgkill"):  # since glibc 2.30
            library.tgkill(pid, pid, _DUMP)
        else:
            os.kill(pid, _DUMP)
        os.kill(pid, signal.SIGCONT)
