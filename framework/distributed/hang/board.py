"""A file by which the ranks of one node see where each other stands, also a rank that does not answer any more."""

import ctypes
import faulthandler
import fcntl
import mmap
import os
import signal
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

DUMP = signal.SIGRTMIN + 7  # has a rank write its stacks; none of the signals that stop a run
NUM_BEATS = 64  # that are remembered

_SLOT_BYTES = 4096  # one rank's place and latest beats
_STACK_BYTES = 1 << 21  # above a hundred threads of a hundred frames each, which is where faulthandler ends
_VERDICT_BYTES = 1 << 16
_PLACE = struct.Struct("<iiidqq")  # rank, pid; state, since when (monotonic), and the collectives on both groups then
_BEATS = struct.Struct("<q")  # so many have there been
_BEAT = struct.Struct("<qq16sqq")  # number, step, phase; collectives on both groups
_BEATS_AT, _RING_AT = 64, 128
assert _RING_AT + NUM_BEATS * _BEAT.size <= _SLOT_BYTES


class State(IntEnum):
    """What a rank says of itself."""

    ABSENT = 0  # it has not come here yet
    RUNNING = 1
    TIMED_OUT = 2  # it has waited in vain for the other ranks
    LOST_PEER = 3  # the connection to a rank that it waited for was closed
    FAILED = 4  # by an error of its own


@dataclass(frozen=True)
class Beat:
    """Where a rank was: on all ranks the same number is the same place in the program."""

    number: int
    step: int
    phase: str
    collectives: tuple[int, int]  # begun before it, on the default process group and on `control`

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.step else self.phase


@dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    local_rank: int
    rank: int
    pid: int
    state: State
    since: (
        float  # seconds of the monotonic clock, which the processes of a machine share; 0 unless it has told an error
    )
    collectives: tuple[int, int]  # begun so far, if it has told its error; otherwise as of the latest beat
    beats: tuple[Beat, ...]  # the latest, oldest first


class Board:
    """This rank's slot, which it writes, and those of the others on this node, which it reads.

    Writing costs a microsecond and no system call. The file holds the slots, the verdict, and room for a stack of each
    rank; it may be deleted once every rank has opened it.
    """

    def __init__(self, path: Path, *, rank: int, local_rank: int, num_local: int) -> None:
        self.local_rank = local_rank
        self.num_local = num_local
        self.leads = False
        self._number = 0
        self._descriptor = descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, self._stack_at(num_local))
        # on a full disk a write to memory without a page behind it is fatal, and this is an error
        os.posix_fallocate(descriptor, local_rank * _SLOT_BYTES, _SLOT_BYTES)
        self._slots = mmap.mmap(descriptor, num_local * _SLOT_BYTES)
        # the handler works in C: also where a loop in C never lets Python run again
        self._stack = open(path, "r+b", buffering=0)
        self._stack.seek(self._stack_at(local_rank))
        faulthandler.register(DUMP, file=self._stack, all_threads=True)
        self._write_place(rank, os.getpid(), State.RUNNING, 0.0, 0, 0)

    def close(self) -> None:
        faulthandler.unregister(DUMP)
        self._stack.close()
        os.close(self._descriptor)

    def beat(self, phase: str, *, step: int, collectives: tuple[int, int]) -> None:
        """Write down that this rank is about to do `phase` (at most 16 characters) of a step."""
        at = self.local_rank * _SLOT_BYTES
        place = at + _RING_AT + self._number % NUM_BEATS * _BEAT.size
        _BEAT.pack_into(self._slots, place, self._number, step, phase.encode(), *collectives)
        self._number += 1
        _BEATS.pack_into(self._slots, at + _BEATS_AT, self._number)

    def tell(self, state: State, *, stack: str, collectives: tuple[int, int]) -> None:
        """Write down how this rank's work has ended, and where."""
        if not self.stack(self.local_rank):
            os.pwrite(self._descriptor, stack.encode()[: _STACK_BYTES - 1], self._stack_at(self.local_rank))
        rank, pid = _PLACE.unpack_from(self._slots, self.local_rank * _SLOT_BYTES)[:2]
        self._write_place(rank, pid, state, time.monotonic(), *collectives)

    def _write_place(self, *values: float) -> None:
        at = self.local_rank * _SLOT_BYTES
        # at once: packed in place, it would be zero for a moment
        self._slots[at : at + _PLACE.size] = _PLACE.pack(*values)

    @property
    def mine(self) -> Place:
        return self.place(self.local_rank)

    def others(self) -> list[Place]:
        return [self.place(local_rank) for local_rank in range(self.num_local) if local_rank != self.local_rank]

    def place(self, local_rank: int) -> Place:
        at = local_rank * _SLOT_BYTES
        rank, pid, state, since, *collectives = _PLACE.unpack_from(self._slots, at)
        (total,) = _BEATS.unpack_from(self._slots, at + _BEATS_AT)
        beats = [self._beat(at, number) for number in range(max(0, total - NUM_BEATS), total)]
        told = State(state) > State.RUNNING
        latest = (collectives[0], collectives[1]) if told or not beats else beats[-1].collectives
        if state == State.ABSENT:  # then its slot is empty; launchers number a node's ranks in one row
            rank = _PLACE.unpack_from(self._slots, self.local_rank * _SLOT_BYTES)[0] - self.local_rank + local_rank
        return Place(local_rank, rank, pid, State(state), since, latest, tuple(beats))

    def _beat(self, at: int, number: int) -> Beat:
        place = at + _RING_AT + number % NUM_BEATS * _BEAT.size
        number, step, phase, *collectives = _BEAT.unpack_from(self._slots, place)
        return Beat(number, step, phase.rstrip(b"\0").decode(), (collectives[0], collectives[1]))

    def stack(self, local_rank: int) -> str:
        """Return what a rank has written of its stack so far."""
        return _text_at(self._descriptor, self._stack_at(local_rank), _STACK_BYTES)

    def _stack_at(self, local_rank: int) -> int:
        return self.num_local * _SLOT_BYTES + _VERDICT_BYTES + local_rank * _STACK_BYTES

    def try_lead(self) -> bool:
        """Take the lead in finding out what has happened, if no living rank has it and it is not known yet."""
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
        text, at = verdict.encode()[: _VERDICT_BYTES - 1], self.num_local * _SLOT_BYTES
        os.pwrite(self._descriptor, text[1:], at + 1)
        os.pwrite(self._descriptor, text[:1], at)  # the first byte last: until then a reader sees nothing

    @property
    def verdict(self) -> str:
        """What the leader has found, or an empty string."""
        return _text_at(self._descriptor, self.num_local * _SLOT_BYTES, _VERDICT_BYTES)


def have_write(pid: int) -> None:
    """Have a rank write its stacks, as they are. One that is stopped goes on then.

    The signal is for its main thread: any other would write only after the main one had gone on from where it was stopped.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):  # since glibc 2.30
        libc.tgkill(pid, pid, DUMP)
    else:
        os.kill(pid, DUMP)
    os.kill(pid, signal.SIGCONT)


def posted_verdict(path: Path, *, num_local: int) -> str:
    """Return the verdict on the board at `path`, for one who is no rank; an empty string while there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        return _text_at(descriptor, num_local * _SLOT_BYTES, _VERDICT_BYTES)
    finally:
        os.close(descriptor)


def _text_at(descriptor: int, at: int, size: int) -> str:
    return os.pread(descriptor, size, at).partition(b"\0")[0].decode(errors="replace")
