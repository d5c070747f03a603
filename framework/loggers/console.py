"""The console: a progress line on a terminal, plain lines elsewhere."""

import logging
import math
import sys
import time
from datetime import timedelta
from typing import Any

from framework.loggers.sink import RunInfo
from framework.runs.metrics_file import is_curve
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION

_LINE_EVERY_S, _UPDATE_EVERY_S = 2.0, 0.1
_WIDTH_FOR_BAR = 110  # columns
_SHOW_CURSOR = b"\r\n\x1b[?25h"  # the progress line hides the terminal's cursor


class Console:
    """Always on. Validation and test rows are separate lines in either form; training rows are shown by the clock."""

    def open(self, run: RunInfo) -> None:
        self._total_steps = run.total_steps
        self._first_step = run.step
        self._start = time.monotonic()
        self._progress = _progress_line(run)
        self._shown_at = -math.inf

    def log(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        if row["split"] == "train" and row["step"] < self._total_steps:
            if now - self._shown_at < (_LINE_EVERY_S if self._progress is None else _UPDATE_EVERY_S):
                return  # small models take thousands of steps a second
            self._shown_at = now
        step, numbers = row["step"], _numbers(row)
        seconds = (now - self._start) / max(1, step - self._first_step) * (self._total_steps - step)
        eta = f"eta {timedelta(seconds=round(seconds))}"
        if row["split"] != "train":
            LOGGER.info("%s", f"step {step}/{self._total_steps}  {row['split']}  {numbers}")
        elif self._progress is not None:
            progress, task = self._progress
            progress.update(task, completed=step, numbers=f"{eta}  {numbers}")
        else:
            LOGGER.info("%s", f"step {step}/{self._total_steps}  {numbers}  {eta}")

    def close(self, summary: dict[str, Any]) -> None:
        if self._progress is not None:
            self._progress[0].stop()
            PREEMPTION.last_words = b""
            _log_to_stderr()


def _progress_line(run: RunInfo) -> Any:
    if not sys.stderr.isatty():
        return None
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TextColumn

    console = RichConsole(stderr=True)
    if console.is_dumb_terminal:
        return None
    PREEMPTION.last_words = _SHOW_CURSOR
    progress = Progress(
        *([BarColumn(bar_width=20)] if console.width >= _WIDTH_FOR_BAR else []),
        TextColumn("step {task.completed}/{task.total}  {task.fields[numbers]}"),  # a narrow terminal cuts its end
        console=console,
    )
    task = progress.add_task("train", total=run.total_steps, completed=run.step, numbers="")
    progress.start()
    _log_to_stderr()
    return progress, task


def _log_to_stderr() -> None:
    """Write the log to the current sys.stderr: while the progress line is on, rich's, which writes above the line."""
    for handler in LOGGER.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)


def _numbers(row: dict[str, Any]) -> str:
    shown = []
    for name, value in row.items():
        if name == "samples_per_s":
            shown.append(f"{value:,.0f} samples/s")
        elif name == "lr":
            shown.append(f"lr {value:.2e}")
        elif is_curve(name):
            shown.append(f"{name} {value:.4f}")
    return "  ".join(shown)
