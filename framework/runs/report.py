"""The report on the runs below a root, and its page. The runs' files may be damaged, or belong to other users."""

import base64
import hashlib
import html
import json
import math
import os
import re
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from framework.config.identity import is_below
from framework.runs.compare import environment_of
from framework.runs.directory import RECORD_FILES, RunDirectory
from framework.runs.history import Series, read_history
from framework.runs.metrics_file import number
from framework.runs.provenance import Provenance
from framework.runs.settings import TextByKey, differing, execution_of, read_config, settings_of, with_options
from framework.runtime.files import write_atomically

_MOVED_ASIDE = re.compile(r"\.old-\d+$")
_MOST_BYTES = 16 << 20  # for provenance.json
_MOST_POINTS = 300  # per training curve: a screen cannot show more
_NUMBERS = ("step", "samples_seen", "wall_s", "train_s", "goodput", "restarts")
_NOT_SHOWN = ("run", "hash", "mode", "hydra", "name")  # keys of a configuration that describe a run's place, like its label


@dataclass(frozen=True)
class ReportedRun:
    """The report's view of one run."""

    label: str  # the run's path below the root
    state: str
    note: str  # why it failed, or which files could not be read
    plain: dict[str, Any]  # the configuration, as it is in its file
    config: TextByKey
    monitor: str
    mode: str  # min or max, for the monitor
    series: dict[str, Series]  # by SPLIT/METRIC
    numbers: dict[str, float]  # of summary.json; nan if unknown
    origin: dict[str, str]  # of the latest start: command, commit, packages, ...; empty without a record


def find_runs(root: Path) -> list[Path]:
    """Return the directories of the runs below `root`, without runs that were moved aside."""
    found = []
    for path, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _MOVED_ASIDE.search(name) and not name.startswith(".")]
        if len({*files, *folders}.intersection(RECORD_FILES)) >= 2:  # a run has at least two of these files
            found.append(Path(path))
            folders.clear()
    return sorted(found)


def name_below(path: Path, root: Path) -> str:
    """Return a run's path below `root`, the directory's name if the root is the run, or two names of a run elsewhere."""
    if path == root:
        return path.resolve().name
    return str(path.relative_to(root) if path.is_relative_to(root) else Path(*path.parts[-2:]))


class RunReader:
    """A reader of all runs below a root. It can be called again: then it reads only runs with changed files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read: dict[Path, tuple[Any, ReportedRun]] = {}

    def read(self) -> tuple[list[ReportedRun], list[str]]:
        """Return the runs below the root, and one line about each run that had to be left out."""
        left_out, before, self._read = [], self._read, {}
        for path in find_runs(self._root):
            label, directory = printable(name_below(path, self._root)), RunDirectory(path)
            try:
                if odd := directory.odd_files():
                    raise OSError(f"{odd[0]} is not a plain file")
                files = path / "config.yaml", path / "provenance.json", directory.metrics, directory.summary
                version = directory.state, *map(_version_of, files)
                known = before.get(path)
                run = known[1] if known is not None and known[0] == version else _read_run(directory, label)
                self._read[path] = version, run
            except (OSError, RecursionError) as error:
                why = error.strerror if isinstance(error, OSError) else None
                left_out.append(f"{label}: {printable(why or str(error))}")
        return [run for _, run in self._read.values()], left_out


def _version_of(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def printable(text: str) -> str:
    """Return `text` in a form that UTF-8 can encode, without characters that do not print."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _read_run(directory: RunDirectory, label: str) -> ReportedRun:
    summary = directory.read_summary()
    plain = read_config(directory.path)
    config = {printable(key): printable(text) for key, text in settings_of(plain or {}).items()}
    monitor, mode = config.get("checkpoint.monitor", "val/loss"), config.get("checkpoint.mode", "min")
    found = dict[str, Series]()
    if directory.metrics.exists():
        found = read_history(directory.metrics, monitor=monitor, mode=mode, most=_MOST_POINTS, aside=("samples_per_s",))
    state = directory.state
    lacks_rows = not found and state != "running"  # a running run may not have its first row yet
    missing = {
        "summary.json that can be read": not summary,
        "config.yaml that can be read": plain is None,
        "metrics": lacks_rows,
    }
    notes = [str(summary.get("error") or ""), *(f"no {what}" for what, is_missing in missing.items() if is_missing)]
    return ReportedRun(
        label=label,
        state=printable(state),
        note=printable("; ".join(" ".join(note.split()) for note in notes if note)),
        plain=plain or {},
        config={key: value for key, value in config.items() if key.split(".")[0] not in _NOT_SHOWN},
        monitor=monitor,
        mode=mode,
        series={printable(name): one for name, one in found.items()},
        numbers={name: number(summary.get(name)) for name in _NUMBERS},
        origin=_read_origin(directory.path),
    )


def _read_origin(path: Path) -> dict[str, str]:
    """Return the known facts of a run's latest start."""
    file = path / "provenance.json"
    if not file.is_file() or file.stat().st_size > _MOST_BYTES:
        return {}
    if (start := Provenance(path).latest) is None:
        return {}
    facts = {"at": start.at, "command": start.command, "host": start.host, **environment_of(start)}
    return {printable(name): printable(text) for name, text in facts.items()}


def count_states(states: list[str]) -> str:
    """Return the number of runs, and the number in each state, as text."""
    counts = ", ".join(f"{count} {state}" for state, count in Counter(states).most_common())
    return f"{len(states)} run{'s' * (len(states) != 1)}: {counts}"


# --- the page


_FILES = Path(__file__).with_name("page")
_MOST_PANELS = 8


def write_page(runs: list[ReportedRun], left_out: list[str], target: Path, *, title: str, every_s: float | None = None) -> None:
    """Write the page atomically. The page reloads itself every `every_s` seconds; with None it does not."""
    content = _content(runs) | {"title": title, "left_out": left_out, "written": time.time(), "every": every_s}
    # a "<" could end the element; an "&" or a line separator could have a meaning for some reader
    plain = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")
    style, script = ("".join((_FILES / name).read_text() for name in names)
                     for names in (("uPlot.min.css", "page.css"), ("uPlot.iife.min.js", "page.js")))  # fmt: skip
    allowed = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    page = Template((_FILES / "page.html").read_text())
    write_atomically(target, page.substitute(title=html.escape(title), policy=policy, style=style, script=script, data=plain))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _content(runs: list[ReportedRun]) -> dict[str, Any]:
    grids: dict[tuple[int, ...], int] = {}
    configs = with_options([run.config for run in runs])
    differ, execution = differing(configs), execution_of(*(run.plain for run in runs))
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
    }


def _packed(series: Series, grids: dict[tuple[int, ...], int]) -> tuple[int, str]:
    """Return the index of a curve's steps, and its values in 32 bits: precise enough, in a third of the text."""
    values = array("f", series.values)  # a too large value becomes infinite, and is not drawn
    if sys.byteorder == "big":
        values.byteswap()
    return grids.setdefault(tuple(series.steps), len(grids)), base64.b64encode(values.tobytes()).decode()
