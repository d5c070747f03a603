"""`curves.png`: a run's loss and metrics over its steps, drawn from metrics.jsonl."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework.runs.metrics_file import MACHINE, Row, is_maximised, read_rows

_SPLITS = {"train": "#9aa5b1", "val": "#1f77b4", "test": "#d62728"}
NOT_CURVES = ("step", "split", "epoch", "lr", "grad_norm", *MACHINE)
_ACROSS = 3  # panels in a row


def draw_curves(metrics: Path, target: Path, *, title: str, restarts: list[int], monitor: str, mode: str) -> None:
    """Draw one panel for each metric, with all splits. Without rows no file is written.

    The best validation value is marked, and `restarts`: the steps from which the run was continued. `monitor` and `mode`
    are `checkpoint.monitor` and `checkpoint.mode`.
    """
    from matplotlib.figure import Figure  # half a second: only at the end of a run

    rows = read_rows(metrics)
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if name not in NOT_CURVES]
    if not names:
        return
    across, down = min(_ACROSS, len(names)), math.ceil(len(names) / _ACROSS)
    figure = Figure(figsize=(5 * across, 3.6 * down), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(down, across, number)
        for split, color in _SPLITS.items():
            shown = [row for row in rows if row["split"] == split and row.get(name) is not None]
            pick_best = max if is_maximised(f"{split}/{name}", monitor=monitor, mode=mode) else min
            _draw_split(axes, shown, name, split, color, pick_best)
        for index, step in enumerate(restarts):
            axes.axvline(step, color="#ff7f0e", linestyle=":", linewidth=1, zorder=1, label="restart" if index == 0 else None)
        axes.set(xlabel="step", title=name)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(target, dpi=120)


def _draw_split(axes: Any, rows: list[Row], name: str, split: str, color: str, pick_best: Callable[..., int]) -> None:
    if not rows:
        return
    steps, values = [row["step"] for row in rows], [row[name] for row in rows]
    marker = "o" if len(rows) < 30 else None
    axes.plot(steps, values, color=color, label=split, marker=marker, markersize=3, linewidth=1.2)
    if split == "val":
        best = pick_best(range(len(values)), key=values.__getitem__)
        axes.plot(steps[best], values[best], marker="*", color=color, markersize=11, linestyle="none",
                  label=f"best {values[best]:.4g} at {steps[best]}")  # fmt: skip
