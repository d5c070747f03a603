"""Python's hash of text, which differs from process to process unless it is told not to."""

import os
import sys
from contextlib import suppress

from framework.runtime.environment import variables


def fix_hashes() -> None:
    """Begin this process again with one hash seed for all, unless PYTHONHASHSEED is given, or the program has been called by
    another one within this process.

    So the order of a set, and whatever the user's code computes by hash(), is the same on every rank and after a restart.
    """
    program, *given = sys.argv
    before = len(sys.orig_argv) - len(given)
    options = sys.orig_argv[1:before]
    is_main = program in options or ("-m" in options and program.endswith("__main__.py"))
    if "PYTHONHASHSEED" in variables() or not sys.executable or not is_main or sys.orig_argv[before:] != given:
        return
    variables()["PYTHONHASHSEED"] = "0"
    with suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
