"""What a report shows of the runs below a root, read from their files, which may be damaged or from other users."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from framework.config.folders import parse_yaml
from framework.runs.directory import RECORD_FILES, RunDirectory
from framework.runs.metrics_file import Row, is_curve, is_maximised, sampled_rows
from framework.runtime.problem import shown

_MOVED_ASIDE = re.compile(r"\.old-\d+$")
_MOST_POINTS = 300  # of a training curve: a screen shows no more
_MOST_KEYS = 2000  # of a configuration
_NOT_SHOWN = ("run", "hash", "mode", "hydra", "name")  # of a configuration: the place of a run, which its label says

Curve = tuple[list[float], list[float]]  # steps, values


@dataclass(frozen=True)
class ReportedRun:
    """What the report shows of one run. The keys of `last`, `best` and `curves` are SPLIT/METRIC."""

    label: str  # its path below the root
    state: str
    note: str  # why it failed, or which files could not be read
    config: dict[str, str]  # the keys with dots, the values as YAML writes them
    monitor: str
    last: dict[str, float]
    best: dict[str, float]
    curves: dict[str, Curve]
    numbers: dict[str, float]  # step, wall_s, goodput, restarts; nan if it is not known


def find_runs(root: Path) -> list[Path]:
    """Return the directories of the runs below `root`, except runs that were moved aside."""
    found = []
    for path, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _MOVED_ASIDE.search(name) and not name.startswith(".")]
        if len({*files, *folders}.intersection(RECORD_FILES)) >= 2:  # a run has two of them at least
            found.append(Path(path))
            folders.clear()
    return sorted(found)


def read_runs(root: Path) -> tuple[list[ReportedRun], list[str]]:
    """Return the runs below `root`, and a line about each run that had to be left out."""
    runs, left_out = [], []
    for path in find_runs(root):
        label = printable(str(path.relative_to(root)))
        try:
            if odd := RunDirectory(path).odd_files():
                raise OSError(f"{odd[0]} is not a plain file")
            runs.append(_read_run(RunDirectory(path), label))
        except OSError as error:
            left_out.append(f"{label}: {printable(error.strerror or str(error))}")
    return runs, left_out


def differing(runs: list[ReportedRun]) -> list[str]:
    """Return the keys of the configurations whose values differ between the runs that have them."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [key for key in keys if len({run.config[key] for run in runs if key in run.config}) > 1]


def printable(text: str) -> str:
    """Return `text` as UTF-8 can hold it, without characters that do not print."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _read_run(directory: RunDirectory, label: str) -> ReportedRun:
    summary = directory.read_summary()
    config, damaged = _read_config(directory.path / "config.yaml")
    rows = sampled_rows(directory.metrics, most=_MOST_POINTS) if directory.metrics.exists() else []
    missing = {"summary.json that can be read": not summary, "config.yaml that can be read": damaged, "metrics": not rows}
    notes = [str(summary.get("error") or ""), *(f"no {what}" for what, is_missing in missing.items() if is_missing)]
    monitor = config.get("checkpoint.monitor", "val/loss")
    last, best, curves = _metrics(rows, monitor=monitor, mode=config.get("checkpoint.mode", "min"))
    return ReportedRun(
        label=label,
        state=printable(directory.state),
        note=printable("; ".join(" ".join(note.split()) for note in notes if note)),
        config={key: value for key, value in config.items() if key.split(".")[0] not in _NOT_SHOWN},
        monitor=monitor,
        last=last,
        best=best,
        curves=curves,
        numbers={name: number(summary.get(name)) for name in ("step", "wall_s", "goodput", "restarts")},
    )


def _read_config(path: Path) -> tuple[dict[str, str], bool]:
    try:
        config = parse_yaml(path.read_bytes())
        return dict(islice(_flat(config), _MOST_KEYS)), not isinstance(config, dict)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}, True


def _flat(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values one by one, so that a file whose aliases multiply does no harm."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif key == "_target_":  # the choice of an option
            yield printable(prefix.rstrip(".")), printable(str(value).rpartition(".")[2])
        else:
            yield printable(f"{prefix}{key}"), _written(value)


def _written(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_written(item) if not isinstance(item, (list, dict)) else "..." for item in value[:20]) + "]"
    return shown(value) if value is None or isinstance(value, bool) else printable(str(value))


def _metrics(rows: list[Row], *, monitor: str, mode: str) -> tuple[dict[str, float], dict[str, float], dict[str, Curve]]:
    found: dict[tuple[str, str], Curve] = {}
    for row in rows:
        step, split = number(row["step"]), row["split"]
        for name in (name for name in row if is_curve(name) or name == "samples_per_s"):
            if math.isfinite(value := number(row[name])):
                steps, values = found.setdefault((split, name), ([], []))
                steps.append(step)
                values.append(value)
    curves = {printable(f"{split}/{name}"): curve for (split, name), curve in found.items()}
    last = {name: values[-1] for name, (_, values) in curves.items()}
    best = {name: max(values) if is_maximised(name, monitor=monitor, mode=mode) else min(values)
            for name, (_, values) in curves.items()}  # fmt: skip
    curves.pop("train/samples_per_s", None)
    return last, best, curves


def number(value: Any) -> float:
    """Return a file's value as a number; nan if it is not a number, or too large for a float."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan


def parsed(value: Any) -> float | None:
    """Return the number that a text writes (a number stays as it is); None if it is not a number."""
    try:
        return float(value)
    except ValueError:
        return None


def count_states(states: list[str]) -> str:
    """Return how many runs there are, and in which states, as text."""
    counts = ", ".join(f"{count} {state}" for state, count in Counter(states).most_common())
    return f"{len(states)} run{'s' * (len(states) != 1)}: {counts}"
