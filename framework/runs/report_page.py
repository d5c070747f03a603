"""`report.html`: all runs of a root on one page that needs no other file. The scripts in `page/` draw its content."""

import base64
import hashlib
import html
import json
import math
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from framework.config.identity import is_below
from framework.runs.history import Curve, History
from framework.runs.metrics_file import is_maximised
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
    style = (_FILES / "page.css").read_text()
    script = '"use strict"\n' + "".join(path.read_text() for path in sorted(_FILES.glob("*.js")))
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


class _Distinct:
    """Values that many runs share, each kept once. `add` returns a value's index in `values`."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[Any, int] = {}

    def add(self, value: Any, *, key: Any) -> int:
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value)
        return self._places[key]


def _content(runs: list[ReportedRun]) -> dict[str, Any]:
    grids, origins = _Distinct(), _Distinct()
    configs = with_options([run.config for run in runs])
    differ, execution = differing(configs), execution_of(*(run.config for run in runs))
    common = {key: value for key, value in configs[0].items() if all(config.get(key) == value for config in configs)}
    owns = [{key: value for key, value in config.items() if key not in common} for config in configs]
    own_keys = dict.fromkeys(key for own in owns for key in own)
    tests = {name for run in runs for name in run.last if name.startswith("test/")}
    return {
        "runs": [_content_of(run, own, grids, origins) for run, own in zip(runs, owns)],
        "grids": grids.values,
        "origins": origins.values,
        "common": common,
        "swept": [key for key in differ if not is_below(key, execution)],
        "computed": [key for key in own_keys if not is_below(key, execution)],
        "execution": [key for key in own_keys if is_below(key, execution)],
        "monitor": Counter(run.monitor for run in runs).most_common(1)[0][0],
        "panels": panel_names(runs),
        "tests": sorted(tests, key=lambda name: (name != "test/loss", name)),
    }


def _content_of(run: ReportedRun, own: TextByKey, grids: _Distinct, origins: _Distinct) -> dict[str, Any]:
    step, samples_seen = run.numbers["step"], run.numbers["samples_seen"]
    batch = samples_seen / step if step else math.nan
    return {
        "label": run.label,
        "state": run.state,
        "note": run.note,
        "monitor": run.monitor,
        "maximised": is_maximised(run.monitor, monitor=run.monitor, mode=run.mode),
        "last": {name: value if math.isfinite(value) else None for name, value in run.last.items()},
        "best": {name: [value, run.best_steps[name]] for name, value in run.best.items()},
        "numbers": {name: value for name, value in run.numbers.items() if math.isfinite(value)},
        "batch": batch if math.isfinite(batch) else None,  # the mean; for a run without a step, the configuration has the size
        "curves": {name: _packed(curve, grids) for name, curve in run.curves.items()},
        "clock": _packed(run.history.clock, grids) if run.history.clock[0] else None,
        "marks": _marks(run.history, grids),
        "own": own,
        "origin": origins.add(run.origin, key=json.dumps(run.origin, sort_keys=True)) if run.origin else None,
        "predictions": run.predictions,
        "pictures": {name: base64.b64encode(content).decode() for name, content in run.pictures.items()},
    }


def _packed(curve: Curve, grids: _Distinct) -> tuple[int, str]:
    """Return the index of a curve's steps, and its values in 32 bits: precise enough, in a third of the text."""
    with np.errstate(over="ignore"):  # a too large value becomes infinite, and is not drawn
        values = np.array(curve[1], dtype="<f4")
    return _grid(curve[0], grids), base64.b64encode(values.tobytes()).decode()


def _grid(steps: Iterable[float], grids: _Distinct) -> int:
    whole = tuple(int(step) for step in steps)
    return grids.add(whole, key=whole)


def _marks(history: History, grids: _Distinct) -> dict[str, Any]:
    hashes = np.array([crc for _, crc in history.marks], dtype="<u4")
    return {"stride": history.stride, "rows": history.num_rows, "grid": _grid((step for step, _ in history.marks), grids),
            "hashes": base64.b64encode(hashes.tobytes()).decode()}  # fmt: skip


def panel_names(runs: list[ReportedRun]) -> list[str]:
    """Return the SPLIT/METRIC names with a panel, loss first. A test has one value, so it has no panel."""
    found = list(dict.fromkeys(name for run in runs for name in sorted(run.curves) if not name.startswith("test/")))
    metrics = dict.fromkeys(["loss", *(name.partition("/")[2] for name in found)])
    ordered = [f"{split}/{metric}" for metric in metrics for split in ("val", "train")]
    return [name for name in ordered if name in found][:_MOST_PANELS]
