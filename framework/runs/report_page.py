"""`report.html`: all runs of a root on one page that needs no other file. uPlot (page/uPlot.LICENSE) draws the curves."""

import base64
import hashlib
import html
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from framework.config.identity import is_below
from framework.runs.history import Series
from framework.runs.report import ReportedRun
from framework.runs.settings import TextByKey, differing, execution_of, with_options
from framework.runtime.files import write_atomically

_FILES = Path(__file__).with_name("page")
_MOST_PANELS = 8


def write_page(runs: list[ReportedRun], left_out: list[str], target: Path, *, title: str, every_s: float | None = None) -> None:
    """Write the page atomically. The page reloads itself every `every_s` seconds; with None it does not."""
    content = _content(runs) | {"title": title, "left_out": left_out, "written": time.time(), "every": every_s}
    # a "<" could end the element; an "&" or a line separator could have a meaning for some reader
    plain = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")
    style, script = ("".join((_FILES / name).read_text() for name in names)
                     for names in (("uPlot.min.css", "page.css"), ("uPlot.iife.min.js", "page.js")))  # fmt: skip
    allowed = f"img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
{(_FILES / "page.html").read_text()}
<script id="data" type="application/json">{plain}</script>
<script>{script}</script>
</body>
</html>
"""
    write_atomically(target, page)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _content(runs: list[ReportedRun]) -> dict[str, Any]:
    grids: dict[tuple[int, ...], int] = {}
    configs = with_options([run.config for run in runs])
    differ, execution = differing(configs), execution_of(*(run.config for run in runs))
    common = {key: value for key, value in configs[0].items() if all(config.get(key) == value for config in configs)}
    owns = [{key: value for key, value in config.items() if key not in common} for config in configs]
    own_keys = dict.fromkeys(key for own in owns for key in own)
    names = dict.fromkeys(name for run in runs for name in sorted(run.series))
    panels = [name for name in names if name.partition("/")[0] != "test" and name != "train/samples_per_s"]
    metrics = dict.fromkeys(["loss", *(name.partition("/")[2] for name in panels)])
    ordered = [f"{split}/{metric}" for metric in metrics for split in ("val", "train")]
    return {
        "runs": [_content_of(run, own, grids) for run, own in zip(runs, owns)],
        "grids": list(grids),
        "common": common,
        "swept": [key for key in differ if not is_below(key, execution)],
        "computed": [key for key in own_keys if not is_below(key, execution)],
        "execution": [key for key in own_keys if is_below(key, execution)],
        "monitor": Counter(run.monitor for run in runs).most_common(1)[0][0],
        "panels": [name for name in ordered if name in names][:_MOST_PANELS],
        "tests": sorted((name for name in names if name.startswith("test/")), key=lambda name: (name != "test/loss", name)),
    }


def _content_of(run: ReportedRun, own: TextByKey, grids: dict[tuple[int, ...], int]) -> dict[str, Any]:
    drawn = {name: one for name, one in run.series.items() if one.steps and not name.startswith("test/")}
    return {
        "label": run.label,
        "state": run.state,
        "note": run.note,
        "monitor": run.monitor,
        "maximised": run.mode == "max",
        "last": {name: one.last if math.isfinite(one.last) else None for name, one in run.series.items()},
        "best": {name: [one.best, one.best_step] for name, one in run.series.items() if math.isfinite(one.best)},
        "numbers": {name: value for name, value in run.numbers.items() if math.isfinite(value)},
        "curves": {name: _packed(one, grids) for name, one in drawn.items()},
        "own": own,
        "origin": run.origin,
        "predictions": run.predictions,
        "pictures": {name: base64.b64encode(content).decode() for name, content in run.pictures.items()},
    }


def _packed(series: Series, grids: dict[tuple[int, ...], int]) -> tuple[int, str]:
    """Return the index of a curve's steps, and its values in 32 bits: precise enough, in a third of the text."""
    with np.errstate(over="ignore"):  # a too large value becomes infinite, and is not drawn
        values = np.array(series.values, dtype="<f4")
    return grids.setdefault(tuple(map(int, series.steps)), len(grids)), base64.b64encode(values.tobytes()).decode()
