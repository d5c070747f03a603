"""What a terminal shows of a run: the rows of the evaluations, and below them a live line."""

import logging
import sys
from collections.abc import Iterable
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from framework.loggers.sink import RunInfo
from framework.runs.metrics_file import in_digits, is_curve
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION

_BAR, _NUMBER = 10, 11  # columns of the live line's bar, and of a number with its star in a row
_NARROW = 60  # in a terminal with fewer columns, the live line has no bar
_SHOW_CURSOR = b"\r\n\x1b[?25h"  # the live line hides the terminal's cursor


class _Line(Progress):
    def get_renderables(self) -> Iterable[RenderableType]:
        if self.tasks:
            yield Constrain(self.make_tasks_table(self.tasks), self.console.width - 3)  # a terminal prints ^C after the line


class Terminal:
    """A terminal that can move its cursor: a live line, which leaves no trace, below the rows of the evaluations."""

    def __init__(self, console: Console, run: RunInfo) -> None:
        self._console, self._run, self._best = console, run, run.best
        self._names: list[str] = []  # of the latest printed header
        PREEMPTION.last_words = _SHOW_CURSOR
        wide = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        numbers = TextColumn("{task.fields[numbers]}", markup=False, table_column=wide)
        step = TextColumn("{task.completed:.0f}/{task.total:.0f}")
        times = TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(compact=True)
        bar = [BarColumn(_BAR)] if console.width >= _NARROW else []
        self._progress = _Line(*bar, step, numbers, *times, console=console, transient=True, expand=True)
        self._task = self._progress.add_task("", total=run.total_steps, completed=run.step, numbers="")
        self._progress.start()
        _log_to_stderr()

    def update(self, row: dict[str, Any], numbers: str) -> None:
        """Show a training row in the live line."""
        self._progress.update(self._task, completed=row["step"], numbers=numbers)

    def add_row(self, row: dict[str, Any]) -> None:
        """Print the row of an evaluation, below a header if its columns differ from those of the previous row.

        As many columns as fit: first the loss and the monitored metric. A star marks the best monitored value so far.
        """
        split, _, monitored = self._run.monitor.partition("/")
        names = sorted(filter(is_curve, row), key=lambda name: (name != "loss", name != monitored))
        names = names[: max(1, (self._console.width - len("step split")) // (_NUMBER + 2))]
        is_best = row["split"] == split and self._is_best(row.get(monitored))
        table = Table(box=None, pad_edge=False, show_header=names != self._names, header_style="none")
        table.add_column("step", justify="right", min_width=max(len("step"), len(str(self._run.total_steps))))
        table.add_column("split", min_width=len("split"))
        for name in names:
            table.add_column(Text(name), justify="right", overflow="fold", min_width=max(_NUMBER, cell_len(name)))
        stars = ["*" if is_best and name == monitored else "" for name in names]
        numbers = (Text(star + in_digits(row[name])) for name, star in zip(names, stars))
        table.add_row(str(row["step"]), row["split"], *numbers, style="green" if is_best else None)
        self._console.print(table)
        self._names = names

    def _is_best(self, value: float | None) -> bool:
        if value is None:
            return False
        is_better = self._best is None or (value > self._best if self._run.direction == "max" else value < self._best)
        self._best = value if is_better else self._best
        return is_better

    def close(self) -> None:
        self._progress.stop()
        PREEMPTION.last_words = b""
        _log_to_stderr()


def _log_to_stderr() -> None:
    """Write the log to the current sys.stderr. With a live line, this is rich's stream, which writes above the line."""
    for handler in LOGGER.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
