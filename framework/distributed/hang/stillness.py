"""Whether processes do anything: their time on a CPU, and their time in the queue for a CPU."""

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress

from framework.distributed.hang.board import RankSlot


def busy_s(pid: int) -> float:
    """Return the seconds on a CPU, plus the first thread's waiting time for a CPU, if the kernel counts it."""
    fields, waited_s = stat_of(pid), 0.0
    with suppress(OSError), open(f"/proc/{pid}/schedstat") as file:
        waited_s = int(file.read().split()[1]) / 1e9
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + waited_s if fields else 0.0


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, from the process's state on. Return [] if the process does not exist."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []


class Stillness:
    """A detector for a node without progress: no rank has a beat or an error, and no process uses a CPU."""

    def __init__(self) -> None:
        self._beats: list[int] = []
        self._busy_s, self._since, self._looked_at = 0.0, time.monotonic(), 0.0
        self._woke_at, self._slept_s = -math.inf, 0.0

    def lasts_s(self, slots: Sequence[RankSlot]) -> float:
        """Return for how many seconds the ranks have made no progress. Call this often: about every second."""
        now = time.monotonic()
        if now - self._looked_at < 1.0:
            return self._looked_at - self._since
        if self._looked_at and now - self._looked_at > _ASLEEP_S:  # this process was stopped too
            self._since = self._woke_at = now
            self._slept_s = now - self._looked_at
        self._looked_at = now
        beats = [slot.beats[-1].number if slot.beats else -1 for slot in slots]
        busy = sum(busy_s(pid) for slot in slots if slot.pid for pid in (slot.pid, *_descendants(slot.pid)))
        if any(slot.has_reported for slot in slots) or beats != self._beats or self._works(busy, now):
            self._beats, self._busy_s, self._since = beats, busy, now
        return now - self._since

    def slept_s(self, *, timeout_s: float) -> float:
        """Return how long this process and the ranks were stopped, if a time-out now may have this cause. Otherwise return 0.

        Causes are a suspended machine, container or job: the clocks of the collectives did not stop.
        """
        is_recent = time.monotonic() - self._woke_at < timeout_s + _ASLEEP_S
        return self._slept_s if is_recent and self._slept_s > timeout_s / 2 else 0.0

    def _works(self, busy: float, now: float) -> bool:
        return abs(busy - self._busy_s) > _IDLE_SHARE * (now - self._since) + _IDLE_S  # less: a process has ended


_IDLE_SHARE, _IDLE_S = 0.01, 0.2  # the allowed CPU share of idle processes, for example of a thread that listens
_ASLEEP_S = 10.0


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, such as its loader processes, and their descendants."""
    children: list[int] = []
    with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    return children + [other for child in children for other in _descendants(child)]
