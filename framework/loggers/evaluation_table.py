"""The table of a run's evaluations on a terminal, which grows row by row above the live line."""

from typing import Any

from rich.cells import cell_len

from framework.loggers.sink import RunInfo
from framework.runs.metrics_file import in_digits, is_curve

_NARROWEST = 10  # the minimum width of a number, in columns


class EvaluationTable:
    """The table of the evaluations. A star marks the best value of `checkpoint.monitor` until now.

    It has the columns that fit into the terminal: first the loss and the monitored metric. The rows in metrics.jsonl have all
    columns.
    """

    def __init__(self, run: RunInfo) -> None:
        self._run, self._best = run, run.best
        self._of_step = max(len("step"), len(str(run.total_steps)))
        self._columns: list[str] = []  # of the latest printed header

    def lines(self, row: dict[str, Any], *, width: int) -> list[str]:
        """Return a row, below a header if its columns differ from those of the previous row."""
        split, _, monitored = self._run.monitor.partition("/")
        names = [name for name in row if is_curve(name)]
        names.sort(key=lambda name: (name != "loss", name != monitored))  # a stable sort
        columns, room = list[str](), width - self._of_step - len("  split") - 1
        for name in names:
            room -= _width(name) + 2
            columns += [name] if room >= 0 else []
        starred = monitored if row["split"] == split and self._is_best(row.get(monitored)) else ""
        numbers = {name: in_digits(row[name]) + ("*" if name == starred else " ") for name in columns}
        head = [
            f"{'step':>{self._of_step}}  split",
            *(f"{' ' * (_width(name) - 1 - cell_len(name))}{name} " for name in columns),
        ]
        cells = [f"{row['step']:>{self._of_step}}  {row['split']:5}", *(f"{numbers[name]:>{_width(name)}}" for name in columns)]
        has_header, self._columns = columns == self._columns, columns
        return [*([] if has_header else ["  ".join(head).rstrip()]), "  ".join(cells).rstrip()]

    def _is_best(self, value: float | None) -> bool:
        if value is None:
            return False
        is_better = self._best is None or (value > self._best if self._run.direction == "max" else value < self._best)
        self._best = value if is_better else self._best
        return is_better


def _width(name: str) -> int:
    return max(cell_len(name), _NARROWEST) + 1  # + 1 for the star
