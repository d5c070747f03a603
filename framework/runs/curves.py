"""`curves.png`: a run's loss and metrics over its steps, drawn from metrics.jsonl."""

import math
from pathlib import Path

from framework.runs.metrics_file import is_curve, is_maximised, sampled_rows

_SPLITS = {"train": "#9aa5b1", "val": "#1f77b4", "test": "#d62728"}
_ACROSS = 3  # panels in a row
_MOST_POINTS = 5000  # of a curve, which has fewer pixels


def draw_curves(metrics: Path, target: Path, *, title: str, restarts: list[int], monitor: str, mode: str) -> None:
    """Draw one panel for each metric, with all splits. Without rows no file is written.

    The best validation value is marked, and `restarts`: the steps from which the run was continued. `monitor` and `mode`
    are `checkpoint.monitor` and `checkpoint.mode`.
    """
    from matplotlib.figure import Figure  # half a second: only at the end of a run

    rows = sampled_rows(metrics, most=_MOST_POINTS)
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if is_curve(name)]
    if not names:
        return
    across, down = min(_ACROSS, len(names)), math.ceil(len(names) / _ACROSS)
    width, height = 5 * across, 3.6 * down  # inches
    figure = Figure(figsize=(width, height))
    # what layout="constrained" finds, which draws everything twice
    margins = {"left": 0.6 / width, "right": 1 - 0.15 / width, "bottom": 0.5 / height, "top": 1 - 0.65 / height}
    figure.subplots_adjust(**margins, wspace=0.18, hspace=0.3)
    figure.suptitle(title, fontsize=10)
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(down, across, number)
        for split, color in _SPLITS.items():
            points = [(row["step"], row[name]) for row in rows if row["split"] == split and row.get(name) is not None]
            if not points:
                continue
            marker = "o" if len(points) < 30 else None
            axes.plot(*zip(*points), color=color, label=split, marker=marker, markersize=3, linewidth=1.2)
            if split == "val":
                choose = max if is_maximised(f"val/{name}", monitor=monitor, mode=mode) else min
                step, value = choose(points, key=lambda point: point[1])
                axes.plot([step], [value], "*", color=color, markersize=11, label=f"best {value:.4g} at {step}")
        for index, step in enumerate(restarts):
            axes.axvline(step, color="#ff7f0e", linestyle=":", linewidth=1, zorder=1, label="restart" if index == 0 else None)
        axes.set(xlabel="step", title=name)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(target, dpi=120)
