"""Whether processes do anything: their time on a CPU, and their time in the queue for a CPU."""

import math
import time
from collections.abc import Sequence

from framework.distributed.hang.board import RankSlot
from framework.runtime.forks import busy_s, descendants


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
        beats = [slot.num_beats for slot in slots]
        busy = sum(busy_s(pid) for slot in slots if slot.pid for pid in (slot.pid, *descendants(slot.pid)))
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
