"""The hash seed of this process. The first thing that a program does, so this imports little."""

import os
import sys
from contextlib import suppress

from framework.runtime.environment import variables


def fix_hashes() -> None:
    """Start this process again with the same hash seed for all processes.

    Do nothing if PYTHONHASHSEED is set, or if another program in this process has called this program. With one seed, the
    order of a set, and all results of hash() in the user's code, are the same on every rank and after a restart. By default,
    Python's hash of a text differs from process to process.
    """
    options = words_before_arguments()
    is_main = sys.argv[0] in options or ("-m" in options and sys.argv[0].endswith("__main__.py"))
    if "PYTHONHASHSEED" in variables() or not sys.executable or not is_main:
        return
    variables()["PYTHONHASHSEED"] = "0"
    with suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def words_before_arguments() -> list[str]:
    """Return the words that the interpreter received before this program's arguments; [] if the arguments have changed."""
    before = len(sys.orig_argv) - len(sys.argv) + 1
    return sys.orig_argv[1:before] if sys.orig_argv[before:] == sys.argv[1:] else []
