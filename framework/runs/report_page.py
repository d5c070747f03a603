"""`report.html`: all runs of a root on one page that needs nothing else, with a table that sorts and curves that follow it.

A run is a row of one bokeh data source, which the table and every curve share: a run chosen in one is chosen in all.
"""

import colorsys
import functools
import html
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from bokeh import models
from bokeh.embed import file_html
from bokeh.layouts import column, row
from bokeh.models import CDSView, ColumnDataSource, CustomJS, widgets
from bokeh.models.widgets import HTMLTemplateFormatter, TableColumn
from bokeh.plotting import figure
from bokeh.resources import INLINE

from framework.runs.report import ReportedRun, count_states, differing, parsed
from framework.runtime.files import write_atomically

_FIRST_COLORS = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f"]
_CHARACTER = 7.4  # pixels, of the table's font
_MOST_PANELS = 8
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_TABLE_STYLE = models.InlineStyleSheet(
    css=f"""
    .slick-header-column {{ font: 600 12px {_FONT}; color: #37474f; background: #f5f7f9; }}
    .slick-cell {{ font: 12.5px {_FONT}; font-variant-numeric: tabular-nums; border-color: #eceff1 !important; }}
    .slick-row:hover {{ background: #eef4fb; cursor: pointer; }}
    .slick-cell.selected {{ background: #dcebfb; }}
    .swatch {{ display: inline-block; width: 22px; height: 10px; border-radius: 3px; }}
    .number {{ text-align: right; padding-right: 6px; }}
    .state {{ padding: 1px 8px; border-radius: 9px; background: #eceff1; }}
    .finished {{ background: #d7f0dc; }} .running {{ background: #d8e8fc; }}
    .failed, .killed {{ background: #fbdcdc; }} .preempted {{ background: #fdf0d0; }}
"""
)
_PAGE = """
{% block preamble %}
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:;
    font-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'">
<style>
body { font: 14px FONT; color: #263238; padding: 16px 24px !important; }
h1 { font-size: 19px; margin: 0 0 2px; } p { margin: 0 0 10px; color: #607d8b; } details { margin-top: 12px; color: #607d8b; }
</style>
{% endblock %}
{% block contents %}
<h1>{{ title|e }}</h1>
<p>{{ counts|e }}. Click a row or a curve to choose a run (with Ctrl several), the head of a column to sort by it.</p>
{{ super() }}
{% if left_out %}<details open><summary>left out</summary>
{% for line in left_out %}<div>{{ line|e }}</div>{% endfor %}
</details>{% endif %}
{% endblock %}
""".replace("FONT", _FONT)


def write_page(runs: list[ReportedRun], left_out: list[str], target: Path, *, title: str) -> None:
    """Write the page, complete or not at all."""
    counts = f"{count_states([run.state for run in runs])}; {time.strftime('%Y-%m-%d %H:%M')}"
    variables = {"counts": counts, "left_out": left_out}
    write_atomically(target, file_html(_layout(runs), INLINE, title, template=_PAGE, template_variables=variables))


def _layout(runs: list[ReportedRun]) -> Any:
    source = ColumnDataSource({"color": colors(len(runs)), "run": [run.label for run in runs],
                               "state": [run.state for run in runs], "note": [run.note for run in runs]})  # fmt: skip
    view = CDSView(filter=models.AllIndices())
    linear, log = _panels(runs, source, view, "linear"), _panels(runs, source, view, "log")
    log.visible = False
    table = _table(runs, source, view)
    scale = widgets.RadioButtonGroup(labels=["linear", "log"], active=0, width=120, name="scale")
    scale.js_on_change("active", CustomJS(args={"linear": linear, "log": log}, code=_CHOOSE_SCALE))
    shown = widgets.TextInput(placeholder="only runs with these words in them", width=320, name="filter")
    words = [" ".join([run.label, run.state, run.note, *(f"{k}={v}" for k, v in run.config.items())]).lower() for run in runs]
    some = models.BooleanFilter()
    shown.js_on_change("value_input", CustomJS(args={"view": view, "words": words, "some": some}, code=_CHOOSE_RUNS))
    everything = widgets.Button(label="all runs", width=90, name="all")
    everything.js_on_click(CustomJS(args={"source": source}, code="source.selected.indices = []"))
    return column(row(scale, everything, shown), table, linear, log, sizing_mode="stretch_width")


_CHOOSE_SCALE = "linear.visible = this.active == 0; log.visible = !linear.visible"
_CHOOSE_RUNS = r"""
const asked = this.value_input.toLowerCase().split(/\s+/)
some.booleans = words.map((text) => asked.every((word) => text.includes(word)))
view.filter = some"""


# --- the curves


def _panels(runs: list[ReportedRun], source: ColumnDataSource, view: CDSView, scale: Literal["linear", "log"]) -> Any:
    figures: list[Any] = []
    for name in panel_names(runs):
        xs, ys = f"steps of {name}", f"values of {name}"
        if xs not in source.data:
            empty: tuple[list[float], list[float]] = ([], [])
            curves = [run.curves.get(name, empty) for run in runs]
            source.data[xs] = [np.array(steps, dtype=np.float32) for steps, _ in curves]
            source.data[ys] = [np.array(values, dtype=np.float32) for _, values in curves]
        panel = figure(
            height=270, sizing_mode="stretch_width", title=name, y_axis_type=scale, tools="pan,box_zoom,wheel_zoom,tap,reset",
            active_drag="box_zoom", active_scroll=None, x_axis_label="step", name=f"{scale} {name}",
            **({"x_range": figures[0].x_range} if figures else {}),
        )  # fmt: skip
        panel.toolbar.logo, panel.toolbar.autohide = None, True
        panel.grid.grid_line_color, panel.outline_line_color = "#eceff1", None
        curve = functools.partial(models.MultiLine, xs=xs, ys=ys, line_color="color")
        lines = panel.add_glyph(
            source,
            curve(line_width=1.6, line_alpha=0.85),
            selection_glyph=curve(line_width=2.4),
            nonselection_glyph=curve(line_alpha=0.08),
            hover_glyph=curve(line_width=3.2),
            view=view,
        )
        tooltips = [("", "@run"), ("step", "$snap_x{0}"), ("value", "$snap_y{0.0000}")]
        panel.add_tools(models.HoverTool(renderers=[lines], line_policy="nearest", tooltips=tooltips))
        figures.append(panel)
    pairs = [row(*figures[i : i + 2], sizing_mode="stretch_width") for i in range(0, len(figures), 2)]
    return column(*pairs, sizing_mode="stretch_width")


def panel_names(runs: list[ReportedRun]) -> list[str]:
    """Return the SPLIT/METRIC that have a panel: the loss first; a test, which has one value, has no panel."""
    found = list(dict.fromkeys(name for run in runs for name in sorted(run.curves) if not name.startswith("test/")))
    metrics = dict.fromkeys(["loss", *(name.partition("/")[2] for name in found)])
    ordered = [f"{split}/{metric}" for metric in metrics for split in ("val", "train")]
    return [name for name in ordered if name in found][:_MOST_PANELS]


def colors(count: int) -> list[str]:
    """Return a color for each run: ten colors that are easy to distinguish, then more from around the color circle."""
    chosen = _FIRST_COLORS[:count]
    for number in range(len(chosen), count):
        red, green, blue = colorsys.hls_to_rgb(number * 0.618 % 1, (0.38, 0.5, 0.62)[number % 3], 0.65)
        chosen.append(f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}")
    return chosen


# --- the table


def _table(runs: list[ReportedRun], source: ColumnDataSource, view: CDSView) -> widgets.DataTable:
    swatch = HTMLTemplateFormatter(template='<span class="swatch" style="background: <%- value %>"></span>')
    state = HTMLTemplateFormatter(template='<span class="state <%- value %>"><%- value %></span>')
    columns = [TableColumn(field="color", title="", width=34, formatter=swatch, sortable=False),
               _text_column("run", "run", source),
               TableColumn(field="state", title="state", width=100, formatter=state)]  # fmt: skip
    for title, values, kind in _cells(runs):
        field = f"cell {title}"
        numbers = [math.nan if value in ("", "null") else parsed(value) for value in values]
        is_number = None not in numbers
        source.data[field] = np.array(numbers, dtype=float) if is_number else [str(value) for value in values]
        columns.append(_number_column(field, title, kind) if is_number else _text_column(field, title, source))
    if any(run.note for run in runs):
        columns.append(_text_column("note", "note", source))
    return widgets.DataTable(
        source=source, view=view, columns=columns, sizing_mode="stretch_width", height=min(352, 48 + 28 * len(runs)),
        row_height=28, index_position=None, autosize_mode="none", frozen_columns=2, reorderable=False, name="runs",
        stylesheets=[_TABLE_STYLE],
    )  # fmt: skip


def _cells(runs: list[ReportedRun]) -> Iterator[tuple[str, list[Any], str]]:
    """Yield the columns between a run's state and its note, with the kind of their numbers: values that differ between the
    configurations, best and final metrics, progress, and time."""
    for key in differing(runs):
        yield key, [run.config.get(key, "") for run in runs], "setting"
    names = panel_names(runs)
    monitored = dict.fromkeys(run.monitor for run in runs)
    for name in dict.fromkeys([*monitored, *(name for name in names if name.startswith("val/"))]):
        yield f"best {name}", [run.best.get(name, math.nan) for run in runs], "metric"
    tests = {name for run in runs for name in run.curves if name.startswith("test/")}
    for name in [*sorted(tests, key=lambda name: (name != "test/loss", name)), *names]:
        yield name, [run.last.get(name, math.nan) for run in runs], "metric"
    yield "step", [run.numbers["step"] for run in runs], "count"
    yield "time", [run.numbers["wall_s"] for run in runs], "duration"
    yield "samples/s", [run.last.get("train/samples_per_s", math.nan) for run in runs], "count"
    yield "goodput", [run.numbers["goodput"] for run in runs], "share"
    yield "restarts", [run.numbers["restarts"] for run in runs], "count"


_SHOWN = {  # how a number is written: aligned by its point within a column
    "setting": "+value.toPrecision(6)",
    "metric": "Math.abs(value) >= 1e5 || value != 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : value.toFixed(4)",
    "count": 'Math.round(value).toLocaleString("en")',
    "share": 'Math.round(100 * value) + " %"',
    "duration": """[value / 3600, value / 60 % 60, value % 60].map(Math.floor)
        .map((n, i) => i ? String(n).padStart(2, "0") : n).join(":")""",
}


def _number_column(field: str, title: str, kind: str) -> TableColumn:
    width = round(_CHARACTER * max(8, len(title) + 2)) + 16
    template = f'<div class="number"><%= Number.isNaN(value) ? "" : {_SHOWN[kind]} %></div>'
    return TableColumn(field=field, title=html.escape(title), width=width, sorter=models.NanCompare(),
                       formatter=HTMLTemplateFormatter(template=template))  # fmt: skip


def _text_column(field: str, title: str, source: ColumnDataSource) -> TableColumn:
    longest = max(map(len, [title, *source.data[field]]))
    return TableColumn(field=field, title=html.escape(title), width=round(_CHARACTER * min(60, max(6, longest))) + 22,
                       formatter=HTMLTemplateFormatter(template='<span title="<%- value %>"><%- value %></span>'))  # fmt: skip
