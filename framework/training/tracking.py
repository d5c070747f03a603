"""The last and the best values that a run measures, and early stopping."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from framework.config.spelling import did_you_mean
from framework.config.trainer import EarlyStopping
from framework.runs.metrics_file import NOT_CURVES, Row, is_curve
from framework.runtime.exits import Unfit
from framework.training.metrics import Metrics

Derive = Callable[[dict[str, float]], dict[str, float]]


def combined(*sources: tuple[str, Row]) -> Row:
    """Return one row with the columns of all sources, in order. A source is a key, such as `task`, and its columns.

    The loop's own columns have an empty key. Unfit if another source uses one of their names, or if two sources use one name.
    """
    row: Row = {}
    for key, columns in sources:
        for name, value in columns.items():
            if name in row or (key and name in NOT_CURVES):
                raise Unfit(f"{key}: its column {name} has the name of another column (use a new name)")
            row[name] = value
    return row


def require_metric(name: str, row: Row, *, key: str) -> None:
    """Raise Unfit if a row lacks the metric that `key` names: the data may decide whether a task measures it."""
    if name not in row:
        split = row["split"]
        measured = [f"{split}/{other}" for other in row if is_curve(other)]
        choices = "; ".join(filter(None, [f"one of {', '.join(measured)}", did_you_mean(f"{split}/{name}", measured)]))
        raise Unfit(f"{key}: {split}/{name} is not measured ({choices})")


@dataclass(eq=False)
class Patience:
    """Early stopping: a counter of consecutive evaluations without an improvement."""

    settings: EarlyStopping
    best: float | None = None
    num_bad: int = 0

    def note(self, row: Row) -> None:
        """Record a row. A metric that is not a finite number is no improvement. Unfit if the row lacks the metric."""
        split, _, metric = self.settings.monitor.partition("/")
        if row["split"] != split:
            return
        require_metric(metric, row, key="trainer.early_stopping.monitor")
        value = -row[metric] if self.settings.mode == "max" and row[metric] is not None else row[metric]
        if value is not None and (self.best is None or value < self.best - self.settings.min_delta):
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.num_bad = state["best"], state["num_bad"]

    @property
    def is_exhausted(self) -> bool:
        return self.settings.patience is not None and self.num_bad >= self.settings.patience


@dataclass(kw_only=True, eq=False)
class Tracker:
    """The last and the best row of each split. `monitor` is SPLIT/METRIC; other splits are compared by their loss.

    `derive` is a function of the task from the means over samples to the metrics derived from them. `metrics` are the run's
    others.
    """

    monitor: str
    mode: str
    patience: Patience
    derive: Derive
    metrics: Metrics

    def __post_init__(self) -> None:
        self.monitor_split, _, self.monitor_metric = self.monitor.partition("/")
        self.splits: dict[str, dict[str, Row]] = {}

    def columns(self, split: str, means: Row, *, step: int | None) -> list[tuple[str, Row]]:
        """Return a row's position, and the task's columns: the means, and what the task derives from them, for `combined`."""
        return [("", {"step": step, "split": split}), ("task", means | self.derive(means))]

    def note(self, row: Row) -> None:
        """Record a row. A metric that is not a finite number is never the best. Unfit if the row lacks the monitored metric."""
        metric = self.monitor_metric if row["split"] == self.monitor_split else "loss"
        sign = -1 if metric == self.monitor_metric and self.mode == "max" else 1
        require_metric(metric, row, key="checkpoint.monitor")
        split = self.splits.setdefault(row["split"], {})
        before = split.get("best", {}).get(metric)  # also None if the run that this run continues did not measure it
        is_best = before is None or (row[metric] is not None and sign * row[metric] < sign * before)
        split["last"] = row
        if is_best:
            split["best"] = row

    @property
    def best(self) -> float | None:
        """The best value of the monitored metric so far; None if it has not been measured."""
        return self.splits.get(self.monitor_split, {}).get("best", {}).get(self.monitor_metric)

    def monitored(self, *, step: int) -> float | None:
        """Return the monitored value, if it was measured at `step`."""
        row = self.splits.get(self.monitor_split, {}).get("last")
        return row[self.monitor_metric] if row is not None and row["step"] == step else None
