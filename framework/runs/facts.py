"""The messages of a run at its start and its end, one fact per line: what the run is, and what its result is."""

import math
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import best_of_monitor, in_digits, is_curve, number
from framework.runtime.environment import variables
from framework.runtime.log import LOGGER
from framework.runtime.program import program, typed_override

Facts = Iterable[tuple[str, str]]  # labels and texts; a fact without a label belongs to the label above
_BRIEF = "STEADFAST_BRIEF"
_LABEL = 10  # the columns of the label


def be_brief() -> None:
    """Make runs in this process, and in its children, log no facts. A sweep reports the facts of its jobs itself."""
    variables()[_BRIEF] = "1"


def is_brief() -> bool:
    return _BRIEF in variables()


def say(facts: Facts) -> None:
    """Log facts, unless this process must be brief."""
    for label, text in [] if is_brief() else facts:
        LOGGER.info("%s", f"  {label:<{_LABEL}}{text}")


def result(directory: RunDirectory, *, root: str) -> Iterator[tuple[str, str]]:
    """Yield the facts of a finished run, from its summary. `root` is the folder of all runs."""
    summary = directory.read_summary()
    metrics, (best, step) = summary.get("metrics", {}), best_of_monitor(summary)
    if math.isfinite(number(best)):
        yield "best", f"{summary['monitor']} {in_digits(best)} at step {step}"
    for split in sorted(metrics, key=lambda split: ("train", "val", "test").index(split.partition(".")[0])):
        row = metrics[split].get("last", {})
        shown = [f"{name} {in_digits(value)}" for name, value in row.items() if is_curve(name)]
        yield split, "  ".join(shown)
    if took := "; ".join(_costs(summary)):
        yield "took", took
    run = typed_override("run.dir", str(directory.path))
    yield "next", f"{program()} mode=eval {run}"
    yield "", f"{program()} mode=export {run}"
    yield "", f"{program()} mode=report {typed_override('run.root', root)}"


def _costs(summary: dict[str, Any]) -> Iterator[str]:
    wall_s, train_s, samples = (number(summary.get(name)) for name in ("wall_s", "train_s", "samples_seen"))
    if math.isfinite(wall_s):
        yield f"{timedelta(seconds=round(wall_s))}"
    if train_s > 0 and math.isfinite(samples):
        yield f"{samples / train_s:,.0f} samples/s in training"
    memory = [number(peak) for peak in summary.get("memory_gib") or []]
    if memory:
        yield f"{max(memory):.2f} GiB at most" + (" in a process" if len(memory) > 1 else "")
