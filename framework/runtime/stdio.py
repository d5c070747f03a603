"""The standard streams as a shell opens them: closed, full, without a reader, or with a small encoding."""

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from framework.runtime.exits import Exit


def speak(run: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a command line, whatever its streams are, and return its exit code. Failing to print causes no traceback."""
    _open_all()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: the encoding may lack letters of a name
    sys.stdout = _Output(sys.stdout)  # type: ignore[assignment]  # a text stream in all but its class
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except _Unprinted as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter would try again as it ends
        if error.errno == errno.EPIPE:  # `| head` has read enough
            return Exit.FINISHED
        print(f"standard output cannot be written: {error.strerror}", file=sys.stderr)
        return Exit.DISK


class _Unprinted(OSError):
    """Standard output, not a file of the run, could not be written."""


class _Output:
    """Standard output, whose errors differ from errors of files; in all else it is the stream it wraps."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _marked():
            return self._stream.write(text)

    def flush(self) -> None:
        with _marked():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _marked() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Unprinted(error.errno, error.strerror) from error


def _open_all() -> None:
    """Open a null device for a closed stream (`>&-`): otherwise output would go into the next opened file."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it takes the lowest free number, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
