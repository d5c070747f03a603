"""Preemption: a signal sets a flag, and that is all that happens in a handler. The loop asks at its step boundaries."""

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_END = b"\0"  # no signal has this number
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Preemption:
    """The flag. One a process; a forked worker inherits its parent's, with any signal that came before the fork."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.speaks = True  # to the person who sent it: one process of a run does
        self.says = "stopping after this step"
        self.last_words = b""  # what the terminal has to be told before this process ends at once
        self._times = 0
        self._since = 0.0  # on time.monotonic's clock

    @property
    def requested(self) -> bool:
        return self.signum is not None

    def left_of(self, grace_s: float) -> float:
        """Return the seconds of a grace period that are left; infinity if no signal has come to this process."""
        return grace_s - (time.monotonic() - self._since) if self.requested else math.inf

    def watch(self) -> None:
        """Install the handlers, and let in what was blocked until now. Main thread only."""
        for signum in SIGNALS:
            signal.signal(signum, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    @contextmanager
    def heard_at_once(self) -> Iterator[None]:
        """Note signals in a thread: Python's handlers wait for the end of a call into C, and a backward pass is one.

        Main thread only.
        """
        hears, tells = os.pipe()
        os.set_blocking(tells, False)
        for signum in SIGNALS:
            signal.signal(signum, lambda *_: None)  # there must be one, or the pipe is told nothing
        signal.set_wakeup_fd(tells)
        threading.Thread(target=self._listen, args=(hears,), daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            self.watch()
            os.write(tells, _END)
            os.close(tells)

    def _listen(self, hears: int) -> None:
        while (told := os.read(hears, 1)) != _END:
            if told[0] in SIGNALS:
                self._note(told[0], None)
        os.close(hears)

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
            os.write(2, f"{signal.Signals(signum).name}: {self.says}{again}\n".encode())
        if self.signum is None:
            self.signum, self._since = signum, time.monotonic()
        self._times += signum == signal.SIGINT
        children = multiprocessing.active_children()
        if self._times >= 2:  # the person at the terminal means it: as safe as kill -9, and as quick
            for child in children:
                child.kill()
            os.write(2, self.last_words)
            os._exit(128 + signal.SIGINT)
        for child in children:
            child.terminate()  # TERM for whatever came: Ctrl-C has reached the children already


PREEMPTION = Preemption()
