"""This process as the program that a command line has started: its start and its end."""

import atexit
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from framework.runtime.environment import left_over, variables, words_before_arguments
from framework.runtime.preemption import SIGNALS
from framework.runtime.problem import Problem

_UNTIL_TOLD_S = 2.0  # of waiting for threads


def start_problems() -> list[Problem]:
    """Return why no command can run in this process: an option of the interpreter, or variables of another command."""
    problems = []
    if sys.flags.optimize:
        what = "leaves out the assert statements, and Hydra reads a command line with them"
        problems.append(Problem("python -O", what, "python without -O, and: unset PYTHONOPTIMIZE"))
    if names := left_over():
        what = "says that this is one of several processes, but MASTER_ADDR and MASTER_PORT do not say where they meet"
        problems.append(Problem(names[0], what, f"unset {' '.join(names)}; or start with torchrun"))
    return problems


def keep_cuda_for_children() -> None:
    """Let `torch.cuda.is_available` use NVML, unless the user has chosen otherwise.

    Many model files call this function when they are imported. By default it initialises the CUDA driver. After that, no
    process that is forked from this process can use CUDA, for example the process that tries out an optimizer.
    """
    variables().setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def end_process(code: int) -> NoReturn:
    """End this process as sys.exit would, but do not finalize the interpreter, which would free torch's objects one by one.

    Threads of the user's code are waited for, as Python does; a signal ends the wait, with the same code.
    """
    if not _is_whole_process():  # a profiler, for example, reports when this program has ended
        sys.exit(code)
    teller = tell_of_threads(code)
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does: wait for threads, end pools of threads
    teller.cancel()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the stream has no reader any more, or it is closed
            stream.flush()
    os._exit(code)


def tell_of_threads(code: int, *, heard_after_s: float = 0.0) -> threading.Timer:
    """Name the threads that this process, which has done its work, waits for. A signal ends the wait, with this code."""
    since = time.monotonic()
    for signum in SIGNALS:
        signal.signal(signum, lambda *_: os._exit(code) if time.monotonic() - since >= heard_after_s else None)
    teller = threading.Timer(_UNTIL_TOLD_S, _name_threads)
    teller.daemon = True
    teller.start()
    return teller


def _name_threads() -> None:
    """Say what a command waits for that has done its work."""
    names = [one.name for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    if names:
        what = f"the work is done; the process waits for its thread {names[0]} (daemon=True if it need not; a signal ends it)"
        print(what, file=sys.stderr, flush=True)


def _is_whole_process() -> bool:
    """Return whether this process runs only this program. (A profiler, for example, runs this program inside its own.)"""
    *options, last = words_before_arguments() or [""]
    if options[-1:] == ["-m"] and sys.argv[0].endswith("__main__.py"):
        options.pop()
    elif last != sys.argv[0]:
        return False
    pairs = zip(["", *options], options)  # all words must be options of the interpreter, or their values
    return "-m" not in options and all(word.startswith("-") or before in ("-X", "-W") for before, word in pairs)


def program() -> str:
    """Return the first words of this process's command, for another command that the user can paste."""
    path = Path(sys.argv[0])
    if path.name == "train.py":
        return f"python {shlex.quote(sys.argv[0])}"
    if path.name == "__main__.py":
        return "python -m framework"
    if path.name == "steadfast" or shutil.which("steadfast"):
        return "steadfast"
    script = Path(__file__).resolve().parents[2] / "train.py"  # of a checkout; the command may be a notebook anywhere
    if not script.is_file():
        return "python -m framework"
    return "python train.py" if script == Path("train.py").resolve() else f"python {shlex.quote(str(script))}"


_PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)(?:[a-z_/]|\.\.?/)[\w./:+@%-]*", re.ASCII | re.IGNORECASE)


def typed_override(key: str, value: str) -> str:
    """Return `key=value`, for a text, as a user types it: quoted for Hydra and for the shell where they need quotes."""
    if _PLAIN.fullmatch(value):
        return f"{key}={value}"
    value = value.replace("${", "\\${")
    value = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)  # Hydra's rule
    return shell_word(f"{key}='{value}'")


def shell_word(text: str) -> str:
    """Return `text` as one word for a shell. Prefer double quotes for a text with single quotes."""
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text)
