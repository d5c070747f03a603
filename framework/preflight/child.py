"""A forked process for trials: what the user's code stores, caches, prints or breaks there does not reach the run."""

import bdb
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import IO, TypeVar

from framework.runtime.exits import DiskFailed, Interrupted, error_text, exits_as_errors, lacks_memory, place_of
from framework.runtime.forks import Idleness, begin_child, descendants, in_new_thread, place_in, write_stacks_to
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION, held_back

_Found = TypeVar("_Found")
_SILENT_S, _HANGS_S = 10.0, 20.0  # no process uses a CPU: a message, and the end


@dataclass(frozen=True)
class ChildFailure:
    """How a process failed. It is only unfinished if it lacked time or memory; anything else is a fault of the work."""

    what: str
    is_unfinished: bool = False
    hangs: bool = False

    def __str__(self) -> str:
        return self.what


def in_child(
    work: Callable[[], _Found], *, limit_s: float = math.inf, announce: Callable[[], None] | None = None
) -> _Found | ChildFailure:
    """Run `work` in a forked process; return its result, or how the process failed. Interrupted by a signal.

    If it does nothing for ten seconds, a warning says where it waits. With `announce`, which is called after ten seconds, its
    output is discarded.
    """
    with tempfile.TemporaryFile("w+") as stacks:
        return in_new_thread(partial(_in_child, work, stacks, limit_s, announce))


def _in_child(
    work: Callable[[], _Found], stacks: IO[str], limit_s: float, announce: Callable[[], None] | None
) -> _Found | ChildFailure:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(work, theirs, stacks, announce is not None))
    with held_back():
        child.start()
    theirs.close()
    began, idleness, place, why = time.monotonic(), Idleness(), "", None
    with suppress(EOFError):
        while not ours.poll(0.05):
            if announce is not None and time.monotonic() - began > _SILENT_S:
                announce()
            idle_s = idleness.lasts_s([child.pid])
            if idle_s > _SILENT_S and not place:
                place = place_in(child.pid or 0, stacks) or "an unknown place"
                LOGGER.warning("the check of this run has done nothing for %.0f s: it waits at %s", idle_s, place)
            if time.monotonic() - began > limit_s:
                at = place_in(child.pid or 0, stacks)
                why = ChildFailure(f"it took more than {limit_s:.0f} s" + f", and is at {at}" * bool(at), is_unfinished=True)
            elif idle_s > _HANGS_S:
                why = ChildFailure(f"it waits forever at {place}", hangs=True)
            if why or PREEMPTION.requested:
                left = descendants(child.pid or 0)  # the user's, for example of a pool
                child.kill()
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                break
        if ours.poll():
            answer: _Found | ChildFailure = ours.recv()
            child.join()
            return answer
    child.join()
    if PREEMPTION.requested:
        raise Interrupted("stopped before the start; the same command starts the run")
    was_killed = child.exitcode == -signal.SIGKILL  # the kernel does so if there is no memory
    return why or ChildFailure(f"its process {end_of(child.exitcode or 0)}", is_unfinished=was_killed)


def end_of(code: int) -> str:
    """Return how a process with this exit code ended, for example `was killed by SIGKILL`."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with {code}"


def _child(work: Callable[[], object], answer: Connection, stacks: IO[str], is_silent: bool) -> None:
    begin_child()
    write_stacks_to(stacks)
    bdb.Bdb.set_trace = lambda *_, **__: None  # type: ignore[assignment]  # no terminal: the run itself stops at a breakpoint
    if is_silent:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
    try:
        with exits_as_errors():
            found = work()
    except Exception as error:
        lacks = lacks_memory(error) or isinstance(error, DiskFailed)
        found = ChildFailure(f"{error_text(error)} (at {place_of(error)})", is_unfinished=lacks)
    answer.send(found)
    os._exit(0)
