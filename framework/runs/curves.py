"""`curves.png`: a run's loss and metrics over its steps, from metrics.jsonl. Below them: curves of the training itself."""

import io
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from framework.runs.history import Series, read_history
from framework.runtime.exits import headline
from framework.runtime.files import replacing
from framework.runtime.log import LOGGER

_SPLITS = {"train": "#9aa5b1", "val": "#1f77b4", "test": "#d62728"}
_OTHERS = ("#2ca02c", "#9467bd", "#8c564b", "#e377c2")  # further validation sets
_ACROSS = 3  # large panels per row; a small panel has half of the width
_LARGE, _SMALL, _WIDTH = 2.7, 0.8, 1.75  # inches: the heights of large and small axes, and the width of small axes
_BESIDE, _BELOW = 0.75, 0.9  # inches between axes, for their numbers and titles
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

    panels: dict[str, dict[str, Series]] = {}  # by metric and split
    for path, series in read_history(metrics, monitor=monitor, mode=mode, most=_MOST_POINTS, aside=_ASIDE).items():
        split, _, name = path.partition("/")
        if series.steps and (name not in _ASIDE or split == "train"):
            panels.setdefault(name, {})[split] = series
    names = [name for name in panels if name not in _ASIDE]
    if not names:
        return None
    large = [name for name in names if name in ("loss", monitor.partition("/")[2]) or not _is_flat(panels[name])] or names
    small = [name for name in (*names, *_ASIDE) if name in panels and name not in large]
    across = 2 * min(_ACROSS, len(large))
    places = _in_rows([name for name in large for _ in range(2)], across), _in_rows(small, across)
    heights = [height for height, rows in zip((_LARGE, _SMALL), places) for _ in rows]
    width, height = across * (_WIDTH + _BESIDE), 0.3 + sum(heights) + _BELOW * len(heights)
    figure = Figure(figsize=(width, height))
    figure.text(0.5, 1 - 0.1 / height, title, fontsize=10, ha="center", va="top")
    margins = {"left": 0.6 / width, "right": 1 - 0.15 / width, "bottom": 0.5 / height, "top": 1 - 0.7 / height,
               "wspace": _BESIDE / _WIDTH, "hspace": _BELOW * len(heights) / sum(heights)}  # fmt: skip
    all_axes = figure.subplot_mosaic([*places[0], *places[1]], height_ratios=heights, empty_sentinel=None, gridspec_kw=margins)
    colors = _colors({split for panel in panels.values() for split in panel})
    for name, axes in all_axes.items():
        _draw(axes, name, panels[name], colors, restarts, is_large=name in large)
    return figure


def _in_rows(names: list[str], across: int) -> list[Any]:
    padded = [*names, *[None] * (-len(names) % across)]
    return [padded[first : first + across] for first in range(0, len(padded), across)]


def _is_flat(of_splits: dict[str, Series]) -> bool:
    """Return whether nine of ten values are equal within one percent, so that a curve would show nothing."""
    values = [value for series in of_splits.values() for value in series.values]
    middle = median(values)
    return sum(abs(value - middle) <= 0.01 * abs(middle) for value in values) >= 0.9 * len(values)


def _colors(splits: set[str]) -> dict[str, str]:
    """Return the color of each split."""
    others = sorted(splits - _SPLITS.keys())
    return _SPLITS | {split: _OTHERS[number % len(_OTHERS)] for number, split in enumerate(others)}


def _draw(
    axes: Any, name: str, of_splits: dict[str, Series], colors: dict[str, str], restarts: list[int], *, is_large: bool
) -> None:
    for split in filter(of_splits.__contains__, colors):
        series, color = of_splits[split], colors[split]
        marker = "o" if is_large and len(series.steps) < 30 else None
        axes.plot(
            series.steps, series.values, color=color, label=split, marker=marker, markersize=3, linewidth=1 + 0.2 * is_large
        )
        if is_large and split == "val":
            best, step = series.best, series.best_step
            axes.plot([step], [best], "*", color=color, markersize=11, label=f"best {best:.4g} at {step}")
    for index, step in enumerate(restarts):
        axes.axvline(step, color="#ff7f0e", linestyle=":", linewidth=1, zorder=1, label="restart" if index == 0 else None)
    axes.grid(alpha=0.3)
    if is_large:
        axes.set(xlabel="step", title=name)
        axes.legend(frameon=False)
    else:
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.yaxis.get_offset_text().set_size(7)


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
