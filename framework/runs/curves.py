"""`curves.png`: a run's loss and metrics over its steps, from metrics.jsonl. Below them: curves of the training itself."""

import io
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from framework.runs.metrics_file import Row, is_curve, is_maximised, sampled_rows
from framework.runtime.exits import headline
from framework.runtime.files import replacing
from framework.runtime.log import LOGGER

_SPLITS = {"train": "#9aa5b1", "val": "#1f77b4", "test": "#d62728"}
_OTHERS = ("#2ca02c", "#9467bd", "#8c564b", "#e377c2")  # further validation sets
_ACROSS = 3  # large panels per row
_LARGE, _SMALL = (5.0, 3.6), (2.5, 1.7)  # inches, for a panel with its margins
_MARGINS = {"left": 0.6, "right": 0.15, "top": 0.4, "bottom": 0.5}  # inches, around a panel's axes
_MOST_POINTS = 5000  # per curve; a curve has fewer pixels
_ASIDE = ("lr", "grad_norm", "samples_per_s")  # columns of the training rows that get a small panel


def draw_curves(metrics: Path, target: Path, *, title: str, restarts: list[int], monitor: str, mode: str) -> None:
    """Draw a panel for each metric, with all splits, and small panels for flat metrics and for the training itself.

    The best validation value is marked. `restarts` are marked too: the steps from which the run was continued. `monitor` and
    `mode` are `checkpoint.monitor` and `checkpoint.mode`. Without rows, no file is written.
    """
    draw = partial(_figure, metrics, title=title, restarts=restarts, monitor=monitor, mode=mode)
    write_figure(target, draw, dpi=110)


def _figure(metrics: Path, *, title: str, restarts: list[int], monitor: str, mode: str) -> Any:
    from matplotlib.figure import Figure  # takes half a second: only at the end of a run

    rows = sampled_rows(metrics, most=_MOST_POINTS)
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if is_curve(name)]
    if not names:
        return None
    large = [name for name in names if name in ("loss", monitor.partition("/")[2]) or not _is_flat(rows, name)] or names
    small = [name for name in names if name not in large]
    small += [name for name in _ASIDE if any(row.get(name) is not None for row in rows)]
    width = min(_ACROSS, len(large)) * _LARGE[0]
    height = 0.3  # the height of the title
    places = []  # left, top, width and height in inches
    for sizes, count in ((_LARGE, len(large)), (_SMALL, len(small))):
        across = round(width / sizes[0])
        places += [(width / across * (n % across), height + sizes[1] * (n // across), *sizes) for n in range(count)]
        height += sizes[1] * math.ceil(count / across)
    figure = Figure(figsize=(width, height))
    figure.text(0.5, 1 - 0.1 / height, title, fontsize=10, ha="center", va="top")
    for name, (left, top, wide, high) in zip([*large, *small], places):
        inner = wide - _MARGINS["left"] - _MARGINS["right"], high - _MARGINS["top"] - _MARGINS["bottom"]
        start = left + _MARGINS["left"], height - top - high + _MARGINS["bottom"]
        axes = figure.add_axes((start[0] / width, start[1] / height, inner[0] / width, inner[1] / height))
        if name in large:
            _draw_metric(axes, rows, name, restarts, is_max=is_maximised(f"val/{name}", monitor=monitor, mode=mode))
        else:
            _draw_aside(axes, rows, name, restarts)
    return figure


def _is_flat(rows: list[Row], name: str) -> bool:
    """Return whether nine of ten values are equal within one percent, so that a curve would show nothing."""
    values = [row[name] for row in rows if row.get(name) is not None]
    middle = median(values) if values else math.nan
    return sum(abs(value - middle) <= 0.01 * abs(middle) for value in values) >= 0.9 * len(values)


def _colors(rows: list[Row]) -> dict[str, str]:
    """Return the color of each split."""
    others = sorted({row["split"] for row in rows} - _SPLITS.keys())
    return _SPLITS | {split: _OTHERS[number % len(_OTHERS)] for number, split in enumerate(others)}


def _points(rows: list[Row], name: str, split: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if row["split"] == split and row.get(name) is not None]


def _draw_metric(axes: Any, rows: list[Row], name: str, restarts: list[int], *, is_max: bool) -> None:
    for split, color in _colors(rows).items():
        if points := _points(rows, name, split):
            marker = "o" if len(points) < 30 else None
            axes.plot(*zip(*points), color=color, label=split, marker=marker, markersize=3, linewidth=1.2)
            if split == "val":
                step, value = (max if is_max else min)(points, key=lambda point: point[1])
                axes.plot([step], [value], "*", color=color, markersize=11, label=f"best {value:.4g} at {step}")
    for index, step in enumerate(restarts):
        axes.axvline(step, color="#ff7f0e", linestyle=":", linewidth=1, zorder=1, label="restart" if index == 0 else None)
    axes.set(xlabel="step", title=name)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_aside(axes: Any, rows: list[Row], name: str, restarts: list[int]) -> None:
    for split, color in _colors(rows).items():
        if name not in _ASIDE or split == "train":
            axes.plot(*zip(*_points(rows, name, split)), color=color, label=split, linewidth=1)
    for step in restarts:
        axes.axvline(step, color="#ff7f0e", linestyle=":", linewidth=1, zorder=1)
    axes.set_title(name, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.yaxis.get_offset_text().set_size(7)
    axes.grid(alpha=0.3)


# --- pictures


def png_of(figure: Any, *, dpi: int) -> bytes:
    """Return a figure as a PNG picture. All its texts are shown as they are; the numbers at its axes do not exist yet."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(text.get_text().replace("$", r"\$"))  # two dollar signs would begin and end a formula
    content = io.BytesIO()
    with warnings.catch_warnings():  # the font shows a box for a letter that it does not have
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure.savefig(content, dpi=dpi, format="png", pil_kwargs={"optimize": True})
    return content.getvalue()


def write_figure(target: Path, draw: Callable[[], Any], *, dpi: int) -> None:
    """Write the figure that `draw` returns (None: no picture). If it cannot be drawn, warn. Raise OSError for a full disk."""
    try:
        figure = draw()
        content = None if figure is None else png_of(figure, dpi=dpi)
    except Exception as error:
        LOGGER.warning("%s could not be drawn: %s", target, headline(error))
        return
    if content is not None:
        with replacing(target) as beside:
            beside.write_bytes(content)
