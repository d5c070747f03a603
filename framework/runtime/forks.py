"""Forked processes: what they must not share with their parent, and where they are when they do nothing."""

import faulthandler
import gc
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import IO, Any, TypeVar

import psutil

from framework.runtime.exits import is_own_code
from framework.runtime.files import own_file_positions
from framework.runtime.preemption import PREEMPTION, die_with_parent

Outcome = TypeVar("Outcome")


def begin_child() -> None:
    """Separate a forked process that runs the user's code from its parent: it dies with it, but moves none of its files.

    It was forked `held_back`, and hears signals from now on.
    """
    gc.freeze()  # what it inherits stays: a collection would only touch, and so copy, a million objects
    die_with_parent()
    PREEMPTION.watch_in_child()
    own_file_positions()


def start_in_thread(work: Callable[[], Outcome], *, name: str, daemon: bool) -> Future[Outcome]:
    """Start `work` in a new thread. Return its future result."""
    outcome: Future[Outcome] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return outcome


@contextmanager
def repeating(act: Callable[[], object], *, every_s: float, name: str, ends_within_s: float | None = None) -> Iterator[None]:
    """Let a thread call `act` again and again as long as the context lasts; wait for its last call at most `ends_within_s`."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(every_s):
            act()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(ends_within_s)


def in_new_thread(work: Callable[[], Outcome]) -> Outcome:
    """Return the result of `work`, which runs in a new thread, so that processes which it forks can compute on all cores.

    A process continues as the thread that forks it. A team of OpenMP belongs to the thread that has used it and does not
    survive a fork: a process that is forked by such a thread waits forever at its first parallel loop.
    """
    return start_in_thread(work, name="fork", daemon=False).result()  # what a forked process starts is no daemon either


# --- processes that do nothing


def comes_true(condition: Callable[[], object], *, within_s: float) -> bool:
    """Return whether a condition becomes true in this time. Wait for it."""
    until = time.monotonic() + within_s
    while not (is_true := bool(condition())) and time.monotonic() < until:
        time.sleep(0.05)
    return is_true


Use = dict[int, tuple[float, float]]  # of each thread: its seconds on a CPU, and the seconds that it has waited for one


def cpu_use(pid: int) -> Use:
    """Return what the threads of a process have used. If the kernel does not count it, return one entry for the process."""
    used: Use = {}
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                on_cpu, waiting, _ = map(int, file.read().split())
                used[int(thread)] = on_cpu / 1e9, waiting / 1e9
    if not used:
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            used[pid] = times.user + times.system, 0.0
    return used


def busy_s(before: Use, now: Use, *, elapsed_s: float) -> float:
    """Return the seconds that the threads would have computed in `elapsed_s` if no other process had used the CPUs.

    On a loaded machine a thread that polls waits for a CPU almost always, and a thread that computes does too. But the first
    uses a small share of the rest of its time, and the second uses all of it. A thread that has ended counts with all its time.
    """
    busy = sum(before[thread][0] for thread in before.keys() - now.keys())
    for thread, (on_cpu, waiting) in now.items():
        on_cpu, waiting = on_cpu - before.get(thread, (0.0, 0.0))[0], waiting - before.get(thread, (0.0, 0.0))[1]
        if on_cpu > 0.0:
            busy += elapsed_s * on_cpu / max(on_cpu, elapsed_s - waiting)
    return busy


def status_of(pid: int) -> str:
    """Return what psutil calls a process's status, as in `stopped`, `zombie` or `disk-sleep`; "" if it does not exist."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, such as its loader processes, and their descendants."""
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def bytes_read(pid: int) -> int:
    """Return how much a process has read, by calls of the kernel and by page faults: a slow disk is no hang.

    Return 0 where the kernel does not tell.
    """
    with suppress(OSError), open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/io") as file:
        faults = int(stat.read().rpartition(")")[2].split()[9])
        return int(file.readline().split()[1]) + faults * os.sysconf("SC_PAGE_SIZE")
    return 0


class Idleness:
    """How long some processes and their descendants have neither used a CPU nor, if this counts, read anything."""

    _SHARE, _LOOK_S = 0.05, 0.4  # the allowed CPU share of each process that only waits or polls; seconds between two looks
    _ASLEEP_S = 10.0

    def __init__(self, *, counts_reads: bool = True) -> None:
        self._counts_reads = counts_reads
        self._used: Use = {}
        self._read = 0
        self._looked_at = self._since = time.monotonic()
        self._woke_at, self._slept_s = -math.inf, 0.0

    def lasts_s(self, pids: Sequence[int | None]) -> float:
        """Return the seconds since the processes have last been seen to do something. Call this often."""
        now = time.monotonic()
        if now - self._looked_at < self._LOOK_S:
            return self._looked_at - self._since
        everyone = [other for pid in pids if pid is not None for other in (pid, *descendants(pid))]
        used: Use = {}
        for pid in everyone:
            used |= cpu_use(pid)
        busy = busy_s(self._used, used, elapsed_s=now - self._looked_at)
        read = sum(map(bytes_read, everyone)) if self._counts_reads else 0
        allowed = min(0.5, self._SHARE * len(everyone)) * (now - self._looked_at)
        if now - self._looked_at > self._ASLEEP_S:  # this process was stopped too
            self._woke_at, self._slept_s = now, now - self._looked_at
        if busy > allowed or read != self._read or self._woke_at == now:
            self._since = now
        self._used, self._read, self._looked_at = used, read, now
        return now - self._since

    def slept_s(self, *, timeout_s: float) -> float:
        """Return how long this process was stopped too, if a time-out now may have this cause. Otherwise return 0.

        Causes are a suspended machine, container or job: the clocks of the collectives did not stop.
        """
        is_recent = time.monotonic() - self._woke_at < timeout_s + self._ASLEEP_S
        return self._slept_s if is_recent and self._slept_s > timeout_s / 2 else 0.0


def write_stacks_to(file: IO[Any]) -> None:
    """Let this process, and the processes that it forks, write their stacks to a file when `place_in` asks for them."""
    faulthandler.register(signal.SIGQUIT, file, all_threads=True)


def place_in(pid: int, stacks: IO[Any]) -> str:
    """Return where a process waits, as `FILE:LINE in FUNCTION`: in the user's code if possible, and in a descendant first.

    The process must have called `write_stacks_to`. Return "" if it writes no stack.
    """
    for other in (*reversed(descendants(pid)), pid):
        file, before = stacks.fileno(), os.fstat(stacks.fileno()).st_size
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGQUIT)
        until = time.monotonic() + 1.0
        while os.fstat(file).st_size == before and time.monotonic() < until:
            time.sleep(0.02)
        written = os.pread(file, 1 << 20, before).decode(errors="replace")  # the processes share the file's position
        found = re.findall(r'File "(.+)", line (\d+) in (.+)', written)
        if own := next((place for place in found if is_own_code(place[0])), None):
            return "{}:{} in {}".format(*own)
    return ""
