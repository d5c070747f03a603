"""Preemption: a signal handler only sets a flag, which the loop reads at its step boundaries. Also: the parent's death."""

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
    """The flag; each process has one. A forked worker inherits its parent's flag, with any signal that came before the fork.

    Only the processes that this framework forks hear SIGTERM as their parent does. It ends all others, as code that forks them
    expects: a pool of the user's waits for its processes after it has sent them SIGTERM.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.speaks = True  # whether this process prints a message for the signal; one process of a run does
        self.says = "stopping after this step"
        self.last_words = b""  # bytes that the terminal needs before this process ends immediately
        self.passes_on = True  # whether this process sends a signal on to its children
        self._times = 0
        self._since = 0.0  # in time.monotonic's seconds
        self._at_fork = threading.local()

    @property
    def requested(self) -> bool:
        return self.signum is not None

    def left_of(self, grace_s: float) -> float:
        """Return the remaining seconds of a grace period. Return infinity if this process has not received a signal."""
        return grace_s - (time.monotonic() - self._since) if self.requested else math.inf

    def watch(self) -> None:
        """Install the handlers, and unblock the signals. Main thread only."""
        for signum in self._heard():
            signal.signal(signum, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def watch_in_child(self) -> None:
        """Install the handlers in a process that was forked `held_back`. Its parent prints the messages."""
        self.speaks, self.last_words = False, b""
        self.watch()

    def leave_in_child(self) -> None:
        """In a forked process: let SIGTERM end it. It prints nothing, and writes nothing into the pipe of its parent."""
        if (handler := signal.getsignal(signal.SIGTERM)) in (self._note, self._wake):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.speaks = False
        if handler == self._wake:
            signal.set_wakeup_fd(-1)
        self.go_on()

    def pause(self) -> None:
        """Let signals wait while a process is forked: a signal that it gets before it has its handlers would be lost."""
        self._at_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def go_on(self) -> None:
        """Hear signals again, after a fork, as before it."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._at_fork.mask)

    def _heard(self) -> list[signal.Signals]:
        """Return the signals that stop a run. SIGHUP, from a closed terminal, does not stop a run that nohup started."""
        return [signum for signum in SIGNALS if (signum, signal.getsignal(signum)) != (signal.SIGHUP, signal.SIG_IGN)]

    @contextmanager
    def heard_at_once(self) -> Iterator[None]:
        """Note signals in a thread. Python's handlers wait until a call into C ends, and a backward pass is such a call."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        for signum in self._heard():
            signal.signal(signum, self._wake)
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

    def _wake(self, signum: int, frame: FrameType | None) -> None:
        """Do nothing: without a handler in Python, nothing is written to the pipe."""

    @contextmanager
    def not_passed_on(self) -> Iterator[None]:
        """Send no signal on within the context, in which the children are the user's: a pool would lose what it computes."""
        before, self.passes_on = self.passes_on, False
        try:
            yield
        finally:
            self.passes_on = before

    def ignore(self) -> None:
        """Ignore the signals from now on."""
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)

    def reset(self) -> None:
        self.signum = None
        self._times = 0

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None and self.speaks:
            # do not use logging: the interrupted code may hold its lock
            again = "; Ctrl-C again stops at once" if signum == signal.SIGINT else ""
            # erase a live line, which may belong to another process; that process draws the line again below
            erase = "\r\x1b[2K" if os.isatty(2) and variables().get("TERM") not in (None, "dumb", "unknown") else ""
            with suppress(OSError):  # the terminal has closed
                os.write(2, f"{erase}{signal.Signals(signum).name}: {self.says}{again}\n".encode())
        if self.signum is None:
            self.signum, self._since = signum, time.monotonic()
        self._times += signum == signal.SIGINT
        children = multiprocessing.active_children() if self.passes_on else []
        if self._times >= 2:  # the second Ctrl-C is as safe and as fast as kill -9
            for child in children:
                child.kill()
            with suppress(OSError):
                os.write(2, self.last_words)
            os._exit(128 + signal.SIGINT)
        for child in children:
            child.terminate()  # SIGTERM for any signal: the children have received Ctrl-C already


PREEMPTION = Preemption()
os.register_at_fork(before=PREEMPTION.pause, after_in_parent=PREEMPTION.go_on, after_in_child=PREEMPTION.leave_in_child)


@contextmanager
def held_back() -> Iterator[None]:
    """Let signals wait. A process that is forked within also gets them later: when it watches for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Kill this process when its parent dies, however the parent dies: the kernel does it, or, where it does not, a thread."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except AttributeError:
        threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != parent:  # the parent died before prctl was called
        os.kill(os.getpid(), signal.SIGKILL)
