"""The console: on a terminal, a live line below a table of the evaluations; elsewhere, plain lines."""

import bdb
import logging
import math
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from framework.loggers.sink import RunInfo
from framework.runs.metrics_file import in_digits, is_curve
from framework.runtime.log import LOGGER, to_files

if TYPE_CHECKING:
    from framework.loggers.terminal import Terminal

_UPDATE_EVERY_S = 0.1
_LINE_EVERY_S, _RARELY_S = 5.0, 60.0  # seconds between plain lines: at the start, and in a long run
_SHARE = 0.05  # of the time since the start: the pauses grow with the run


class Console:
    """The logger that is always on. Validation and test rows get their own lines; training rows appear at time intervals."""

    def open(self, run: RunInfo) -> None:
        self._total_steps = run.total_steps
        self._first_step = run.step
        self._start = time.monotonic()
        self._shown_at = -math.inf
        self._terminal = _terminal_for(run)
        if self._terminal is not None:
            self._leave_to_debuggers()

    def _leave_to_debuggers(self) -> None:
        """Print plain lines from the first breakpoint on: the live line would hide a debugger's prompt."""
        begin = bdb.Bdb.__init__

        def without_live_line(debugger: bdb.Bdb, *arguments: Any, **options: Any) -> None:
            self.close({})  # before the debugger takes sys.stdout
            begin(debugger, *arguments, **options)

        bdb.Bdb.__init__ = without_live_line  # type: ignore[method-assign,assignment]

    def log(self, row: dict[str, Any]) -> None:
        now, is_training = time.monotonic(), row["split"] == "train"
        if is_training and row["step"] < self._total_steps:
            slowly_s = min(_RARELY_S, max(_LINE_EVERY_S, _SHARE * (now - self._start)))
            if now - self._shown_at < (slowly_s if self._terminal is None else _UPDATE_EVERY_S):
                return  # small models make thousands of steps per second
            self._shown_at = now
        if self._terminal is not None and is_training:
            self._terminal.update(row, _numbers(row))
            return
        words = [f"step {row['step']}/{self._total_steps}", *([] if is_training else [row["split"]]), _numbers(row)]
        if is_training:
            seconds = (now - self._start) / max(1, row["step"] - self._first_step) * (self._total_steps - row["step"])
            words.append(f"eta {timedelta(seconds=round(seconds))}")
        text = "  ".join(words)
        if self._terminal is None:
            LOGGER.info("%s", text)
        else:
            to_files(text, level=logging.INFO)
            self._terminal.add_row(row)

    def close(self, summary: dict[str, Any]) -> None:
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None


def _terminal_for(run: RunInfo) -> "Terminal | None":
    """Return the terminal of stderr. Return None if stderr is not a terminal, or can only print."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console as RichConsole

    from framework.loggers.terminal import Terminal

    console = RichConsole(stderr=True, highlight=False)
    return None if console.is_dumb_terminal else Terminal(console, run)


def _numbers(row: dict[str, Any]) -> str:
    shown = []
    for name, value in row.items():
        if name == "samples_per_s":
            shown.append(f"{value:,.0f} samples/s")
        elif name == "lr":
            shown.append(f"lr {value:.2e}")
        elif is_curve(name):
            shown.append(f"{name} {in_digits(value)}")
    return "  ".join(shown)
