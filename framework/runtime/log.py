"""Logging: with the rank in every line, to the console and to the run's `train.log`; no secret reaches either."""

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
    """Log to stderr, which is rid of secrets: rank 0 everything, the others warnings. Safe to call again in a forked worker."""
    if not isinstance(sys.stderr, Redacting):  # not only the log: also a library's warnings and a last traceback
        sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)  # type: ignore[assignment]  # all but by class
    handler = logging.StreamHandler()
    level = logging.DEBUG if variable("STEADFAST_VERBOSE") else logging.INFO
    handler.setLevel(level if rank == 0 else logging.WARNING)
    handler.setFormatter(_Console(f"[rank {rank}] %(levelname)s: %(message)s"))
    LOGGER.handlers.clear()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False


def start_file(path: Path, *, who: str) -> None:
    """Log to `path` too. All ranks append to the one file: a line is one write, so lines never mix."""
    handler = _File(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{who}] %(levelname)s %(message)s"))
    LOGGER.addHandler(handler)


@contextmanager
def launcher_file(path: Path) -> Iterator[None]:
    """Log to `path` too, for a moment: the launcher's part of a run's log."""
    start_file(path, who="launcher")
    try:
        yield
    finally:
        stop_file()


def to_files(text: str) -> None:
    """Log an error to the files only: a whole story, of which the console gets the headline."""
    for handler in LOGGER.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(LOGGER.makeRecord(LOGGER.name, logging.ERROR, "", 0, "%s", (text,), None))


def stop_file() -> None:
    """Close the log files, so that a process that goes on (a sweep) does not write into a finished run."""
    for handler in [h for h in LOGGER.handlers if isinstance(h, logging.FileHandler)]:
        LOGGER.removeHandler(handler)
        handler.close()


class _File(logging.FileHandler):
    """A file on a disk that may be full: that a line is lost is no reason for a traceback, or for the run to end."""

    def _open(self) -> Any:
        return Redacting(super()._open())

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):  # it writes what is left in its buffer
            super().close()


class _Console(logging.Formatter):
    """Rank and level are worth a word only where something is wrong."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record) if record.levelno >= logging.WARNING else record.message
