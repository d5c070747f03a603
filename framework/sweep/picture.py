"""`sweep.png`: the objective of a sweep's jobs against each swept parameter."""

import math
import textwrap
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

from framework.runs.figures import literal, write_figure
from framework.runs.settings import parsed
from framework.runs.table import TableRow, best_of

_FEW = 12  # the most values with drawn medians


@dataclass(frozen=True)
class Panel:
    """The jobs along one parameter. The axis has numbers if all values are numbers, otherwise categories."""

    key: str
    scale: Literal["linear", "log", "category"]
    values: list[Any]  # one per row: a float, or a str for a category
    rows: list[TableRow]  # the jobs that have the parameter
    medians: list[tuple[Any, float]]  # of the finished jobs' objectives, if several values are compared


def panels(rows: list[TableRow]) -> list[Panel]:
    """Return a panel for each parameter that varies, and for each of several objectives.

    A seed only repeats jobs, so it has a panel only if no other parameter varies.
    """
    keys = dict.fromkeys(key for row in rows for key in row.values)
    having = {key: [row for row in rows if key in row.values] for key in keys}
    varying = [key for key in keys if len({row.values[key] for row in having[key]}) > 1]
    found = [_panel(key, having[key], [row.values[key] for row in having[key]])
             for key in varying if key != "seed" or len(varying) == 1]  # fmt: skip
    measured = dict.fromkeys(name for row in rows for name in row.objectives)
    for name in measured:
        having[name] = [row for row in rows if name in row.objectives]
        found.append(replace(_panel(name, having[name], [repr(row.objectives[name]) for row in having[name]]), medians=[]))
    return found


def _panel(key: str, rows: list[TableRow], values: list[Any]) -> Panel:
    scale: Literal["linear", "log", "category"] = "category"
    numbers = [parsed(value) for value in values]
    if key != "seed" and all(number is not None and math.isfinite(number) for number in numbers):
        values, scale = numbers, "log" if _spans(numbers, 10) else "linear"
    done: dict[Any, list[float]] = {value: [] for value in (values if scale == "category" else sorted(values))}
    for value, row in zip(values, rows):
        if row.state == "finished" and row.objective is not None:
            done[value].append(row.objective)
    medians = [(value, median(objectives)) for value, objectives in done.items() if objectives]
    return Panel(key, scale, values, rows, medians if len(medians) <= _FEW else [])


def _spans(numbers: list[Any], factor: float) -> bool:
    return min(numbers) > 0 and max(numbers) >= factor * min(numbers)


def draw(rows: list[TableRow], target: Path, *, monitor: str, mode: str) -> None:
    """Draw the panels. Mark the best jobs, and draw failed jobs as crosses at the top. Without results, write no file."""
    write_figure(target, partial(_figure, rows, monitor=monitor, mode=mode), dpi=120)


def _figure(rows: list[TableRow], *, monitor: str, mode: str) -> Any:
    from matplotlib.figure import Figure  # takes half a second: only at the end of a sweep

    drawn = panels(rows)
    if not drawn or not any(row.state == "failed" or row.objective is not None for row in rows):
        return None
    across = min(3, len(drawn))
    down = math.ceil(len(drawn) / across)
    figure = Figure(figsize=(1 + 4.5 * across, 0.6 + 3.4 * down), layout="constrained")
    best = best_of(rows, mode=mode)
    marked = [row for row in rows if row.is_pareto] or ([best] if best else [])
    winner = f"; best {best.objective:.4g}: {best.assignment}" if best else ""
    figure.suptitle(textwrap.fill(f"{monitor} ({mode}) of {len(rows)} jobs{winner}", 75 * across), fontsize=10)
    for number, panel in enumerate(drawn, 1):
        axes = figure.add_subplot(down, across, number)
        _draw_panel(axes, panel, marked)
        axes.set(xlabel=panel.key, ylabel=monitor)
    looks = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(looks.values(), looks.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


_LOOKS = {  # of a state: marker, color, color inside
    "finished": ("o", "#1f77b4", "#1f77b4"),
    "failed": ("x", "#d62728", "#d62728"),
    "not finished": ("o", "#9aa5b1", "none"),
}


def _draw_panel(axes: Any, panel: Panel, marked: list[TableRow]) -> None:
    rows = panel.rows
    objectives = [row.objective for row in rows if row.state != "failed" and row.objective is not None]
    if panel.scale == "log":
        axes.set_xscale("log")
        margin = (max(panel.values) / min(panel.values)) ** 0.05
        axes.set_xlim(min(panel.values) / margin, max(panel.values) * margin)
    if objectives and _spans(objectives, 100):
        axes.set_yscale("log")
    if panel.scale == "category":
        medians = [(literal(value), objective) for value, objective in panel.medians]
        panel = replace(panel, values=[*map(literal, panel.values)], medians=medians)
        axes.xaxis.update_units(panel.values)  # in the order of the jobs, not in the order of drawing
        axes.set_xlim(-0.5, len({*panel.values}) - 0.5)
        axes.tick_params(axis="x", rotation=30 if len({*panel.values}) > 4 else 0)
    if panel.medians:  # a line between categories would suggest an order
        look: dict[str, Any] = {"linewidth": 1.2} if panel.scale != "category" else {"linestyle": "", "marker": "_",
                                "markersize": 26, "markeredgewidth": 2}  # fmt: skip
        axes.plot(*zip(*panel.medians), color="#1f77b4", alpha=0.4, label="median", **look)
    for label, (marker, color, inside) in _LOOKS.items():
        chosen = [(value, row.objective) for value, row in zip(panel.values, rows)
                  if (row.state if row.state in _LOOKS else "not finished") == label]  # fmt: skip
        transform = axes.transData
        if label == "failed":  # its last objective has no meaning
            chosen, transform = [(value, 1.0) for value, _ in chosen], axes.get_xaxis_transform()
        if shown := [point for point in chosen if point[1] is not None]:
            axes.scatter(*zip(*shown), marker=marker, s=28, label=label, transform=transform, clip_on=False, zorder=3,
                         **({"color": color} if marker == "x" else {"edgecolors": color, "facecolors": inside}))  # fmt: skip
    if stars := [(panel.values[rows.index(row)], row.objective) for row in marked if row in rows]:
        axes.plot(
            *zip(*stars), "*", color="#ff7f0e", markersize=13, zorder=4, label="Pareto" if marked[0].is_pareto else "best"
        )
    axes.grid(alpha=0.3)
