"""`curves.png`: a run's loss and metrics over its steps, drawn from metrics.jsonl."""

from pathlib import Path
from typing import Any

from framework.metrics import read_rows

_SPLITS = {"train": "#9aa5b1", "val": "#1f77b4", "test": "#d62728"}
NOT_CURVES = ("step", "split", "epoch", "samples_per_s", "lr", "grad_norm")


def draw_curves(metrics: Path, target: Path, *, title: str) -> None:
    """Draw one panel for each metric, all splits in it; the best validation value is marked. No row, no file."""
    from matplotlib.figure import Figure  # half a second: only at the end of a run

    rows = read_rows(metrics)
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if name not in NOT_CURVES]
    if not names:
        return
    figure = Figure(figsize=(5 * len(names), 3.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names):
        for split, color in _SPLITS.items():
            _draw_split(axes, [row for row in rows if row["split"] == split and name in row], name, split, color)
        axes.set(xlabel="step", title=name)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(target, dpi=120)


def _draw_split(axes: Any, rows: list[dict[str, Any]], name: str, split: str, color: str) -> None:
    if not rows:
        return
    steps, values = [row["step"] for row in rows], [row[name] for row in rows]
    marker = "o" if len(rows) < 30 else None
    axes.plot(steps, values, color=color, label=split, marker=marker, markersize=3, linewidth=1.2)
    if split == "val":
        best = (max if name == "accuracy" else min)(range(len(values)), key=values.__getitem__)
        axes.plot(steps[best], values[best], marker="*", color=color, markersize=11, label=f"best {values[best]:.4g}")
