"""Preemption: a signal handler only sets a flag, which the loop reads at its step boundaries; and the parent's death."""

import ctypes
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from framework.runtime.environment import variables

_END = b"\0"  # no signal has this number
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Preemption:
    """The flag, one in each process; a forked worker inherits its parent's, with any signal that came before the fork."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.speaks = True  # prints a message for the signal: one process of a run does
        self.says = "stopping after this step"
        self.last_words = b""  # bytes for the terminal before this process ends at once
        self._times = 0
        self._since = 0.0  # on time.monotonic's clock

    @property
    def requested(self) -> bool:
        return self.signum is not None

    def left_of(self, grace_s: float) -> float:
        """Return the seconds of a grace period that are left; infinity if no signal has come to this process."""
        return grace_s - (time.monotonic() - self._since) if self.requested else math.inf

    def watch(self) -> None:
        """Install the handlers, and unblock the signals. Main thread only."""
        for signum in self._heard():
            signal.signal(signum, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _heard(self) -> list[signal.Signals]:
        """Return the signals that stop a run: SIGHUP, of a terminal that closes, does not where nohup has it ignored."""
        return [signum for signum in SIGNALS if (signum, signal.getsignal(signum)) != (signal.SIGHUP, signal.SIG_IGN)]

    @contextmanager
    def heard_at_once(self) -> Iterator[None]:
        """Note signals in a thread: Python's handlers wait for the end of a call into C, and a backward pass is one.

        Main thread only.
        """
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        for signum in self._heard():
            signal.signal(signum, lambda *_: None)  # without a handler nothing is written to the pipe
        signal.set_wakeup_fd(write_fd)
        threading.Thread(target=self._listen, args=(read_fd,), daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            self.watch()
            os.write(write_fd, _END)
            os.close(write_fd)

    def _listen(self, read_fd: int) -> None:
        while (received := os.read(read_fd, 1)) != _END:
            if received[0] in SIGNALS:
                self._note(received[0], None)
        os.close(read_fd)

    def ignore(self) -> None:
        """Ignore the signals from now on."""
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)

    def reset(self) -> None:
        self.signum = None
        self._times = 0

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None and self.speaks:
            # not through logging, whose lock the interrupted code may hold
            again = "; Ctrl-C again stops at once" if signum == signal.SIGINT else ""
            # in the place of a live line, which may be another process's: it is drawn again below
            erase = "\r\x1b[2K" if os.isatty(2) and variables().get("TERM") not in (None, "dumb", "unknown") else ""
            with suppress(OSError):  # the terminal has closed
                os.write(2, f"{erase}{signal.Signals(signum).name}: {self.says}{again}\n".encode())
        if self.signum is None:
            self.signum, self._since = signum, time.monotonic()
        self._times += signum == signal.SIGINT
        children = multiprocessing.active_children()
        if self._times >= 2:  # the second Ctrl-C: as safe as kill -9, and as quick
            for child in children:
                child.kill()
            with suppress(OSError):
                os.write(2, self.last_words)
            os._exit(128 + signal.SIGINT)
        for child in children:
            child.terminate()  # TERM for any signal: Ctrl-C has reached the children already


PREEMPTION = Preemption()


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies, however it dies (Linux; elsewhere nothing happens)."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except AttributeError:
        return
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)
