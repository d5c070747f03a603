"""A forked process for trials: what the user's code stores, caches, prints or breaks there does not reach the run."""

import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from framework.runtime.exits import Exit, Interrupted
from framework.runtime.preemption import PREEMPTION, die_with_parent
from framework.runtime.problem import Problem

Found = list[dict[str, Any]]  # values that JSON can hold


def in_child(work: Callable[[], Found], *, limit_s: float | None = None, is_silent: bool = False) -> tuple[Found, str]:
    """Run `work` in a forked process; return its result, and how the process failed, or "". Interrupted by a signal.

    `is_silent`: its output is discarded.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(work, theirs, is_silent))
    child.start()
    theirs.close()
    deadline = None if limit_s is None else time.monotonic() + limit_s
    with suppress(EOFError):
        while not ours.poll(0.05):
            if PREEMPTION.requested or (deadline is not None and time.monotonic() > deadline):
                child.kill()
                break
        if ours.poll():
            answer: dict[str, Any] = json.loads(ours.recv_bytes())
            child.join()
            return answer["found"], answer["fate"]
    child.join()
    if PREEMPTION.requested:
        raise Interrupted("stopped before the start; the same command starts the run")
    if deadline is not None and time.monotonic() > deadline:
        return [], f"it took more than {limit_s:g} s"
    return [], f"its process {end_of(child.exitcode or 0)}"


def problems_in_child(work: Callable[[], list[Problem]]) -> list[Problem]:
    """Return the problems that `work` finds in a forked process; if the process fails, a problem that says how."""
    found, fate = in_child(lambda: [asdict(problem) for problem in work()])
    if fate:
        return [Problem("model", f"could not be examined: {fate}", "a model and an optimizer that can be built")]
    return [Problem(**(item | {"code": Exit(item["code"])})) for item in found]


def end_of(code: int) -> str:
    """Return how a process with this exit code ended, for example `was killed by SIGKILL`."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with {code}"


def _child(work: Callable[[], Found], answer: Connection, is_silent: bool) -> None:
    die_with_parent()
    if is_silent:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
    found: Found = []
    fate = ""
    try:
        found = work()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        fate = f"{type(error).__name__}: {' '.join(str(error).split())[:200]} (at {where.filename}:{where.lineno})"
    answer.send_bytes(json.dumps({"found": found, "fate": fate}).encode())
    os._exit(0)
