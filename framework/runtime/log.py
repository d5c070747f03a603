"""Logging without secrets, to the console and to the run's `train.log`. Also: the standard streams as a shell opens them."""

import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from framework.runtime.environment import variables
from framework.runtime.exits import Exit
from framework.runtime.secrets import Redacting

LOGGER = logging.getLogger("steadfast")


def start_console(*, rank: int, who: str | None = None) -> None:
    """Log to stderr without secrets: rank 0 logs everything, the other ranks log warnings. Forked workers may call this again.

    `who` names the process in the log, if the process is not a rank.
    """
    for name in ("stdout", "stderr"):  # not only for the log: also for a library's warnings and for a final traceback
        if not isinstance(stream := getattr(sys, name), Redacting):
            setattr(sys, name, Redacting(stream))
    handler = logging.StreamHandler()
    level = logging.DEBUG if variables().get("STEADFAST_VERBOSE") else logging.INFO
    handler.setLevel(level if rank == 0 else logging.WARNING)
    handler.setFormatter(_Console(f"[{who or f'rank {rank}'}] %(levelname)s: %(message)s"))
    LOGGER.handlers.clear()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False


@contextmanager
def log_file(path: Path, *, who: str = "launcher") -> Iterator[None]:
    """Log to `path` too. All ranks append to the same file. Each line is one write, so lines never mix."""
    handler = _File(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{who}] %(levelname)s %(message)s"))
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        handler.close()


def to_files(text: str, *, level: int = logging.ERROR) -> None:
    """Log to the files only: a traceback (the console gets the headline), or text that a terminal shows in another form."""
    for handler in LOGGER.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(LOGGER.makeRecord(LOGGER.name, level, "", 0, "%s", (text,), None))


class _File(logging.FileHandler):
    """A log file on a disk that may be full. A lost line must not cause a traceback or end the run."""

    def _open(self) -> Any:
        return Redacting(super()._open())

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):  # close() flushes the buffer
            super().close()


class _Console(logging.Formatter):
    """A formatter that shows rank and level of warnings and errors only."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record) if record.levelno >= logging.WARNING else record.message


def speak(run: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a command line with any standard streams, even closed ones. Return the exit code. A failed print raises nothing."""
    _open_all()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: the encoding may not have all letters of a name
    sys.stdout = Redacting(sys.stdout, error=_Unprinted)  # type: ignore[assignment]  # all but by class
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except _Unprinted as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise the interpreter tries to write again when it ends
        if error.errno == errno.EPIPE:  # `| head` has read enough
            return Exit.FINISHED
        print(f"standard output cannot be written: {error.strerror}", file=sys.stderr)
        return Exit.DISK


class _Unprinted(OSError):
    """Standard output could not be written (not a file of the run)."""


def _open_all() -> None:
    """Open a null device for a closed stream (`>&-`). Otherwise output would go into the next opened file."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the new descriptor gets the lowest free number: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
