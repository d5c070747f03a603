"""A sink in a separate process. The sink may be slow, fail or hang, and the run continues without it."""

import dataclasses
import json
import logging
import os
import select
import signal
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from framework.loggers.sink import RunInfo, Samples, Sink
from framework.runs.media import Media
from framework.runs.metrics_file import numbers_of
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION, die_with_parent

TIMEOUT_S = 10.0  # for a sink to end, if its YAML has no timeout_s
_MARGIN_S = 10.0  # additional time, to report that a server did not answer, and to end without the server
_MOST_BYTES = 64 << 20  # the most that may wait for a sink that reads nothing


class SinkFailed(Exception):
    """A sink cannot be used any more."""


class Background:
    """The sink that `make` returns, in a process that is forked immediately, before a model exists that the fork would copy.

    Calls are sent, and the caller does not wait for them. Only `wait`, at the run's end, takes time. Any method may raise
    SinkFailed.
    """

    def __init__(self, make: Callable[[], Sink], *, timeout_s: float | None = None) -> None:
        self._timeout_s = (TIMEOUT_S if timeout_s is None else timeout_s) + _MARGIN_S
        self._unsent = bytearray()
        self._received = b""
        self._socket, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads: gloo's threads, which the child never uses
            self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _serve(theirs, make)
        theirs.close()
        self._socket.setblocking(False)

    def open(self, run: RunInfo) -> None:
        self._send("open", dataclasses.asdict(run) | {"directory": str(run.directory)})

    def log(self, row: dict[str, Any]) -> None:
        self._send("log", row)

    def media(self, item: Media) -> None:
        self._send("media", item._asdict() | {"path": str(item.path)})

    def close(self, summary: dict[str, Any]) -> None:
        self._send("close", summary)

    def wait(self, *, within_s: float) -> None:
        """Wait until the sink has handled all calls, then end it. Wait at most `timeout_s` and at most `within_s`."""
        patience_s = max(0.0, min(self._timeout_s, within_s))
        deadline = time.monotonic() + patience_s
        self._unsent += b"\n"  # the end mark
        try:
            while (left := deadline - time.monotonic()) > 0:
                select.select([self._socket], [self._socket] if self._unsent else [], [], left)
                if not self._exchange():
                    return
            raise SinkFailed(f"it did not end within {patience_s:.0f} s")
        finally:
            self._kill()

    def _send(self, method: str, argument: dict[str, Any]) -> None:
        self._unsent += json.dumps([method, argument]).encode() + b"\n"
        if not self._exchange():
            raise SinkFailed("its process has ended")
        if len(self._unsent) > _MOST_BYTES:
            self._kill()
            raise SinkFailed(f"it reads nothing: {len(self._unsent) >> 20} MiB wait for it")

    def _exchange(self) -> bool:
        """Send and receive without waiting. Return whether the process still runs: False if it ended without an error."""
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:  # the received data show whether the process has ended, and why
                del self._unsent[: self._socket.send(self._unsent)]
        is_there = False
        try:
            while block := self._socket.recv(1 << 16):
                self._received += block
        except BlockingIOError:
            is_there = True
        except ConnectionResetError:
            pass  # the process has ended without reading everything
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            level, text = json.loads(line)
            if level == _FAILED:
                self._kill()
                raise SinkFailed(text)
            LOGGER.log(level, "%s", text)
        if not is_there and (status := self._kill()):
            raise SinkFailed(f"its process died (wait status {status})")
        return is_there

    def _kill(self) -> int:
        """End the process if it runs. A repeated call is safe. Return the status from `waitpid`."""
        if self._pid == 0:
            return 0
        os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._socket.close()
        self._pid = 0
        return status


_FAILED = -1  # not a level of the log


class _Relay(logging.Handler):
    """A handler that sends the log to the run's process, which has the console."""

    def __init__(self, socket: socket.socket) -> None:
        super().__init__()
        self._socket = socket

    def emit(self, record: logging.LogRecord) -> None:
        self.send(record.levelno, record.getMessage())

    def send(self, level: int, text: str) -> None:
        self._socket.sendall(json.dumps([level, text]).encode() + b"\n")


def _serve(socket: socket.socket, make: Callable[[], Sink]) -> NoReturn:
    """Run the process of a sink until the end mark arrives or the sender has ended."""
    try:
        die_with_parent()
        os.setpgid(0, 0)  # signals from a terminal or a scheduler to the run's processes do not reach this process
        PREEMPTION.ignore()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        relay = _Relay(socket)
        LOGGER.handlers[:] = [relay]
        try:
            _take_calls(socket, make())
        except BaseException as error:  # a sink is a library of somebody else, which can raise anything
            relay.send(_FAILED, " ".join(str(error).split())[:300] or type(error).__name__)
    finally:
        os._exit(0)


def _take_calls(socket: socket.socket, sink: Sink) -> None:
    with socket.makefile("rb") as lines:
        for line in lines:
            if line == b"\n":
                return
            method, argument = json.loads(line)
            if method == "open":
                samples = argument["samples"] and Samples(**argument["samples"])
                argument = RunInfo(**argument | {"directory": Path(argument["directory"]), "samples": samples})
            if method == "log" and not getattr(sink, "takes_lists", False):
                argument = numbers_of(argument)
            if method == "media":
                argument = Media(**argument | {"path": Path(argument["path"])})
            if method != "media" or hasattr(sink, "media"):
                getattr(sink, method)(argument)
