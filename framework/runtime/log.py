"""Logging, to the console and to the run's `train.log`, without secrets."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from framework.runtime.environment import variable
from framework.runtime.secrets import Redacting

LOGGER = logging.getLogger("steadfast")


def start_console(*, rank: int) -> None:
    """Log to stderr, without secrets: rank 0 everything, the others warnings. Can be called again in a forked worker."""
    if not isinstance(sys.stderr, Redacting):  # not only for the log: also for a library's warnings and a last traceback
        sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)  # type: ignore[assignment]  # a text stream in all but its class
    handler = logging.StreamHandler()
    level = logging.DEBUG if variable("STEADFAST_VERBOSE") else logging.INFO
    handler.setLevel(level if rank == 0 else logging.WARNING)
    handler.setFormatter(_Console(f"[rank {rank}] %(levelname)s: %(message)s"))
    LOGGER.handlers.clear()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False


@contextmanager
def log_file(path: Path, *, who: str = "launcher") -> Iterator[None]:
    """Log to `path` too. All ranks append to the one file: a line is one write, so lines never mix."""
    handler = _File(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{who}] %(levelname)s %(message)s"))
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        handler.close()


def to_files(text: str) -> None:
    """Log an error to the files only: a traceback, of which the console gets the headline."""
    for handler in LOGGER.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(LOGGER.makeRecord(LOGGER.name, logging.ERROR, "", 0, "%s", (text,), None))


class _File(logging.FileHandler):
    """A file on a disk that may be full: a lost line must not cause a traceback, or end the run."""

    def _open(self) -> Any:
        return Redacting(super()._open())

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):  # it flushes its buffer
            super().close()


class _Console(logging.Formatter):
    """Shows rank and level of warnings and errors only."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record) if record.levelno >= logging.WARNING else record.message
