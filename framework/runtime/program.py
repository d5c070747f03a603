"""This process as the program that a command line has started: how it begins, and how it ends."""

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from framework.runtime.environment import variables


def fix_hashes() -> None:
    """Begin this process again with one hash seed for all, unless PYTHONHASHSEED is given or it is not this program alone.

    So the order of a set, and whatever the user's code computes by hash(), is the same on every rank and after a restart:
    by itself Python's hash of text differs from process to process.
    """
    if "PYTHONHASHSEED" in variables() or not sys.executable or not _is_whole_process():
        return
    variables()["PYTHONHASHSEED"] = "0"
    with suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def leave(code: int) -> NoReturn:
    """End this process as sys.exit would, but for taking down the interpreter: it would free torch's objects one by one."""
    if not _is_whole_process():  # a profiler, for example, reports when this program has ended
        sys.exit(code)
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(code)


def _is_whole_process() -> bool:
    """Return whether this process runs this program alone: no other one has called it within the process."""
    program, *given = sys.argv
    before = len(sys.orig_argv) - len(given)
    *options, last = sys.orig_argv[:before]
    if options[-1:] == ["-m"] and program.endswith("__main__.py"):
        options.pop()
    elif last != program:
        return False
    pairs = zip(options, options[1:])  # what follows the interpreter must be options of its own, or their values
    are_its_own = all(after.startswith("-") or option in ("-X", "-W") for option, after in pairs)
    return are_its_own and "-m" not in options and sys.orig_argv[before:] == given
