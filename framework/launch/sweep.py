"""The jobs of a sweep, one after the other, each in a process of its own."""

import multiprocessing
import os
import sys

from framework.launch.start import start
from framework.outcome import Exit
from framework.parent import die_with_parent
from framework.preemption import PREEMPTION


class Sweep:
    """Runs command lines and remembers how they ended. One that fails does not stop the next."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}  # by command line

    def run(self, overrides: list[str]) -> int:
        """Run one command line to its end. Returns its exit code."""
        line = " ".join(argument.lstrip("+") for argument in overrides)
        print(f"job {len(self._codes)}: {line}", file=sys.stderr)
        self._codes[line] = _start_in_child(overrides)
        return self._codes[line]

    def report(self) -> int:
        """Name the jobs that failed. Returns the sweep's exit code."""
        failed = {line: code for line, code in self._codes.items() if code not in (Exit.FINISHED, Exit.PREEMPTED)}
        if failed:
            print(f"{len(failed)} of {len(self._codes)} jobs failed:", file=sys.stderr)
        for line, code in failed.items():
            print(f"  exit {code}: {line}", file=sys.stderr)
        return max(self._codes.values(), default=Exit.FINISHED)


def _start_in_child(overrides: list[str]) -> int:
    """Run one command line to its end in a forked child. Returns its exit code.

    What a job leaves in its process (memory, CUDA, the threads of OpenMP, which a later fork would not survive) is gone
    with it. torch is imported here, once, for all jobs.
    """
    import torch  # noqa: F401

    PREEMPTION.watch()
    PREEMPTION.speaks = False  # the job does
    if PREEMPTION.requested:
        return Exit.PREEMPTED
    sys.stdout.flush()
    process = multiprocessing.get_context("fork").Process(target=_run, args=(overrides,))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode if process.exitcode >= 0 else 128 - process.exitcode


def _run(overrides: list[str]) -> None:
    die_with_parent()
    os._exit(_flushed(start(overrides)))


def _flushed(code: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return code
