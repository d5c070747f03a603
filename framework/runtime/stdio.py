"""The standard streams as a shell hands them over: closed, full, with a reader that has left, of a small encoding."""

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from framework.runtime.exits import Exit


def speak(run: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a command line, whatever its streams are, and return its exit code. What cannot be printed is no traceback."""
    _open_all()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: a name may have letters that it lacks
    sys.stdout = _Output(sys.stdout)  # type: ignore[assignment]  # all but by class
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except _Unprinted as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter would try once more as it ends
        if error.errno == errno.EPIPE:  # `| head` has read enough
            return Exit.FINISHED
        print(f"standard output cannot be written: {error.strerror}", file=sys.stderr)
        return Exit.DISK


class _Unprinted(OSError):
    """Standard output, and no file of the run's, could not be written."""


class _Output:
    """Standard output, whose errors can be told from those of files; else it is the stream it wraps."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _told():
            return self._stream.write(text)

    def flush(self) -> None:
        with _told():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Unprinted(error.errno, error.strerror) from error


def _open_all() -> None:
    """Give a closed stream (`>&-`) a null device: else the next file, a checkpoint say, would be what is printed into."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
