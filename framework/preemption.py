"""Preemption: a signal sets a flag, and that is all that happens in a handler. The loop asks at its step boundaries."""

import math
import multiprocessing
import os
import signal
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Preemption:
    """The flag. One a process; a forked worker inherits its parent's, with any signal that came before the fork."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.speaks = True  # to the person who sent it: one process of a run does
        self._times = 0
        self._since = 0.0  # on time.monotonic's clock

    @property
    def requested(self) -> bool:
        return self.signum is not None

    def left_of(self, grace_s: float) -> float:
        """Return the seconds of a grace period that are left; infinity if no signal has come to this process."""
        return grace_s - (time.monotonic() - self._since) if self.requested else math.inf

    def watch(self) -> None:
        """Install the handlers. Main thread only."""
        for signum in SIGNALS:
            signal.signal(signum, self._note)

    def ignore(self) -> None:
        """Have the signals do nothing from now on."""
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)

    def reset(self) -> None:
        self.signum = None
        self._times = 0

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None and self.speaks:
            # not through logging, whose lock the interrupted code may hold
            again = "; Ctrl-C again stops at once" if signum == signal.SIGINT else ""
            os.write(2, f"{signal.Signals(signum).name}: stopping after this step{again}\n".encode())
        if self.signum is None:
            self.signum, self._since = signum, time.monotonic()
        self._times += signum == signal.SIGINT
        children = multiprocessing.active_children()
        if self._times >= 2:  # the person at the terminal means it: as safe as kill -9, and as quick
            for child in children:
                child.kill()
            os._exit(128 + signal.SIGINT)
        for child in children:
            child.terminate()  # TERM for whatever came: Ctrl-C has reached the children already


PREEMPTION = Preemption()
