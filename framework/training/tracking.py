"""The last and the best of what a run measures, and early stopping."""

from typing import Any

from framework.runs.metrics_file import MACHINE, Row
from framework.runtime.exits import Unfit


def require_metric(name: str, row: Row, *, key: str) -> None:
    """Raise Unfit if a row lacks the metric that `key` names: whether a task measures it may depend on the data."""
    if name not in row:
        measured = ", ".join(
            other for other in row if other not in ("step", "split", "lr", "grad_norm", "epoch", *MACHINE)
        )
        raise Unfit(f"{key}: {row['split']}/{name} is not measured here (there are {measured})")


class Tracker:
    """The last and the best row of each split. `monitor` is SPLIT/METRIC; other splits are compared by their loss."""

    def __init__(self, *, monitor: str, mode: str) -> None:
        self.monitor_split, _, self.monitor_metric = monitor.partition("/")
        self.mode = mode
        self.splits: dict[str, dict[str, Row]] = {}

    def note(self, row: Row) -> None:
        """Take a row in. Unfit if it lacks what is monitored."""
        metric = self.monitor_metric if row["split"] == self.monitor_split else "loss"
        sign = -1 if metric == self.monitor_metric and self.mode == "max" else 1
        require_metric(metric, row, key="checkpoint.monitor")
        split = self.splits.setdefault(row["split"], {})
        before = split.get("best", {}).get(metric)  # None also where another run, continued from, did not measure it
        is_best = before is None or sign * row[metric] < sign * before
        split["last"] = row
        if is_best:
            split["best"] = row

    def monitored(self, *, step: int) -> float | None:
        """Return the monitored value, if it was measured at `step`."""
        row = self.splits.get(self.monitor_split, {}).get("last")
        return row[self.monitor_metric] if row is not None and row["step"] == step else None


class Patience:
    """Early stopping: how many evaluations in a row brought no improvement."""

    def __init__(self, *, patience: int | None, monitor: str, mode: str, min_delta: float) -> None:
        self.patience = patience
        self.split, _, self.metric = monitor.partition("/")
        self.sign = -1.0 if mode == "max" else 1.0
        self.min_delta = min_delta
        self.best: float | None = None
        self.num_bad = 0

    def note(self, row: Row) -> None:
        if row["split"] != self.split:
            return
        require_metric(self.metric, row, key="trainer.early_stopping.monitor")
        value = self.sign * row[self.metric]
        if self.best is None or value < self.best - self.min_delta:
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.num_bad = state["best"], state["num_bad"]

    @property
    def is_exhausted(self) -> bool:
        return self.patience is not None and self.num_bad >= self.patience
