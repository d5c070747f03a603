"""The differences of two runs: configuration, code, packages, the first step with different rows, and the final weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.code import changed
from framework.config.frozen_file import recall
from framework.config.identity import is_below
from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import MACHINE, iterate_rows
from framework.runs.provenance import Provenance, Start
from framework.runs.settings import execution_of, settings_of, text_of

TwoValues = dict[str, tuple[str, str]]  # values of the first and the second run; empty if a run has no value


@dataclass(frozen=True)
class RowsDifference:
    """The comparison of two runs' rows. A row is common if both runs have a row of its step and split."""

    num_common: int
    num_alone: tuple[int, int]  # rows that only the first or only the second run has
    last_same: int  # step of the last common row before any value differs; 0: no such row
    first: tuple[int, str] | None  # step and split of the first row with different values; None: no such row
    values: dict[str, tuple[Any, Any]]  # the different values in this row; None if a run has no value
    largest: float  # largest relative difference of a common row's values; infinite if a value is not finite


def config_differences(first: Path, second: Path) -> tuple[TwoValues, TwoValues]:
    """Return the keys with different values: first those that decide what is computed, then those of the execution.

    Raise ValueError if one of the directories has no frozen configuration.
    """
    ours, theirs = recall(first), recall(second)
    pairs, execution = _differing(settings_of(ours), settings_of(theirs)), execution_of(ours, theirs)
    computed = {key: pair for key, pair in pairs.items() if not is_below(key, execution)}
    places = ("run.id", "run.dir", "run.root")
    return computed, {key: pair for key, pair in pairs.items() if key not in computed and key not in places}


def code_differences(first: Path, second: Path) -> list[str]:
    """Return the differences in the user's code that the latest starts of the runs A and B reached, one line per file."""
    ours, theirs = (Provenance(path).read().modules for path in (first, second))
    if ours is None or theirs is None:
        missing = [name for name, modules in (("A", ours), ("B", theirs)) if modules is None]
        return [f"not compared: {' and '.join(missing)} has no record of its starts (provenance.json)"]
    return changed(ours, theirs)


def environment_differences(first: Path, second: Path) -> TwoValues:
    """Return the differences in the environments of the latest starts: commit, packages, Python, hosts and devices."""
    return _differing(*(environment_of(Provenance(path).latest) for path in (first, second)))


def rows_difference(first: Path, second: Path) -> RowsDifference:
    """Compare every value of every row, except values that come from a clock or from the machine."""
    ours, theirs = ({(row["step"], row["split"]): row for row in iterate_rows(RunDirectory(path).metrics)}
                    for path in (first, second))  # fmt: skip
    common = [key for key in ours if key in theirs]
    parted: tuple[int, str] | None = None
    last_same = 0
    values: dict[str, tuple[Any, Any]] = {}
    largest = 0.0
    for key in sorted(common, key=lambda key: key[0]):  # stable: a training row comes before the evaluation of its step
        differing = {name: (ours[key].get(name), theirs[key].get(name)) for name in ours[key].keys() | theirs[key].keys()
                     if name not in MACHINE and not _same(ours[key].get(name), theirs[key].get(name))}  # fmt: skip
        largest = max([largest, *(_relative(*pair) for pair in differing.values())])
        if differing and parted is None:
            parted, values = key, {name: differing[name] for name in [*ours[key], *theirs[key]] if name in differing}
        last_same = key[0] if parted is None else last_same
    alone = len(ours) - len(common), len(theirs) - len(common)
    return RowsDifference(len(common), alone, last_same, parted, values, largest)


def weights_difference(first: Path, second: Path) -> str:
    """Return the comparison of two runs' final weights, in words. At most one tensor of each run is in memory at a time."""
    import torch
    from safetensors import SafetensorError, safe_open

    ours, theirs = RunDirectory(first).weights, RunDirectory(second).weights
    if missing := [str(path.parent) for path in (ours, theirs) if not path.is_file()]:
        return f"not compared: {' and '.join(missing)} has no weights yet"
    try:
        with safe_open(ours, framework="pt") as left, safe_open(theirs, framework="pt") as right:
            names, others = set(left.keys()), set(right.keys())
            distances: dict[str, float] = {}
            for name in sorted(names & others):
                a, b = left.get_tensor(name), right.get_tensor(name)
                if a.shape != b.shape or a.dtype != b.dtype:
                    distances[name] = math.inf
                elif not torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)):
                    wide = torch.complex128 if a.is_complex() else torch.float64
                    distances[name] = (a.to(wide) - b.to(wide)).abs().max().item()
    except (OSError, SafetensorError) as error:
        return f"not compared: {error}"
    if names != others:
        return f"{len(names & others)} tensors have the same name, {len(names ^ others)} are in one run only"
    if not distances:
        return f"the same, to the last bit ({len(names)} tensors)"
    worst = max(distances, key=lambda name: distances[name])
    by = "another shape or type" if distances[worst] == math.inf else f"by {distances[worst]:.3g}"
    return f"{len(distances)} of {len(names)} tensors differ, the most in {worst}: {by}"


def environment_of(start: Start | None) -> dict[str, str]:
    """Return the environment of a start: versions, commit, packages, hosts and devices. {}: there is no record of it."""
    if start is None:
        return {}
    found = {"framework": start.framework, "python": start.python}
    if start.git is not None:
        found["commit"] = start.git.commit + (" with changes" if start.git.diff or start.git.incomplete else "")
    found |= start.packages
    for workers in start.workers[-1:]:
        found |= {"hosts": text_of(workers.hosts), "devices": text_of(workers.devices)}
    return found


def _differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> TwoValues:
    names = dict.fromkeys([*ours, *theirs])
    return {name: (ours.get(name, ""), theirs.get(name, "")) for name in names if ours.get(name) != theirs.get(name)}


def _same(first: Any, second: Any) -> bool:
    return first == second or (first != first and second != second)  # nan equals nan here


def _relative(first: Any, second: Any) -> float:
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return max((_relative(*pair) for pair in zip(first, second) if not _same(*pair)), default=0.0)
    if not (isinstance(first, (int, float)) and isinstance(second, (int, float))):
        return math.inf
    distance = abs(first - second) / max(abs(first), abs(second))
    return distance if math.isfinite(distance) else math.inf
