"""This process as the program that a command line has started: how it begins, and how it ends."""

import atexit
import os
import shlex
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from framework.runtime.environment import variables


def fix_hashes() -> None:
    """Begin this process again with one hash seed for all, unless PYTHONHASHSEED is given, or the program has been called by
    another one within this process.

    So the order of a set, and whatever the user's code computes by hash(), is the same on every rank and after a restart:
    by itself Python's hash of text differs from process to process.
    """
    options = _words_before_arguments()
    is_main = sys.argv[0] in options or ("-m" in options and sys.argv[0].endswith("__main__.py"))
    if "PYTHONHASHSEED" in variables() or not sys.executable or not is_main:
        return
    variables()["PYTHONHASHSEED"] = "0"
    with suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def keep_cuda_for_children() -> None:
    """Let `torch.cuda.is_available` ask NVML, unless the user has chosen.

    Many a model's file calls it when it is imported. By default it initialises CUDA's driver, and then no process forked from
    this one can use CUDA, such as the one that tries out an optimizer.
    """
    variables().setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def end_process(code: int) -> NoReturn:
    """End this process as sys.exit would, but for taking down the interpreter: it would free torch's objects one by one."""
    if not _is_whole_process():  # a profiler, for example, reports when this program has ended
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does: waits for threads, ends pools of them
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(code)


def _is_whole_process() -> bool:
    """Return whether this process runs this program alone, and not a profiler, for example, that runs it."""
    *options, last = _words_before_arguments() or [""]
    if options[-1:] == ["-m"] and sys.argv[0].endswith("__main__.py"):
        options.pop()
    elif last != sys.argv[0]:
        return False
    pairs = zip(["", *options], options)  # all must be options of the interpreter, or their values
    return "-m" not in options and all(word.startswith("-") or before in ("-X", "-W") for before, word in pairs)


def _words_before_arguments() -> list[str]:
    """Return what the interpreter was given before this program's own arguments; nothing if those are others."""
    before = len(sys.orig_argv) - len(sys.argv) + 1
    return sys.orig_argv[1:before] if sys.orig_argv[before:] == sys.argv[1:] else []


def program() -> str:
    """Return how this process's command begins, for another one that can be pasted."""
    path = Path(sys.argv[0])
    if path.name == "train.py":
        return f"python {shlex.quote(sys.argv[0])}"
    return "python -m framework" if path.name == "__main__.py" else "steadfast"
