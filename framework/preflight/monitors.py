"""The metrics that a run can monitor, and for each whether more is better."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from framework.build import components
from framework.build.splits import names_of_validations, validations
from framework.config.schema import Node
from framework.config.spelling import did_you_mean
from framework.config.targets import locate
from framework.config.trainer import CheckpointSection, EarlyStopping, TrainerSection
from framework.runs.metrics_file import MAXIMISED
from framework.runtime.problem import Problem


def monitors_are_metrics(
    task: Node, trainer: TrainerSection, checkpoint: CheckpointSection, metric: Mapping[str, Node], dataset: Node
) -> Iterator[Problem]:
    """Refuse to monitor a metric that neither the task nor the run has. This imports the task."""
    metrics, stopping, evaluated = metric_names(task), trainer.early_stopping, [*validations(dataset)]
    monitors = {"checkpoint.monitor": checkpoint.monitor, "trainer.early_stopping.monitor": stopping.monitor}
    if any(monitor.startswith("val.") for monitor in monitors.values()):
        try:
            evaluated = names_of_validations(dataset, built=components.dataset(dataset))
        except Exception as error:  # the user's data are loaded
            yield Problem.of_error("dataset", error)
            return
    choices = [f"{split}/{name}" for split in (*evaluated, "train") for name in ["loss", *(metrics or ["METRIC"])]]
    choices += [f"{split}/{name}" for split in evaluated for name in metric]
    for key, monitor in monitors.items():
        split, _, column = monitor.partition("/")
        is_column = split in evaluated and any(column.startswith(f"{name}_") for name in metric)  # of a metric with several
        if monitor in choices or is_column or (metrics is None and column and split in (*evaluated, "train")):
            continue
        close = did_you_mean(monitor, choices)
        expected = "one of " + ", ".join(choices) + (f"; {close}" if close else "")
        yield Problem(key, f"{monitor!r} is not valid", expected)


def directed(
    section: CheckpointSection | EarlyStopping, key: str, *, task: Node, metric: Mapping[str, Node]
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the `mode` of a section's monitor as an update of the section, if it is null. This imports the task."""
    if section.mode is not None:
        return {}, []
    more = _is_more_better(section.monitor.partition("/")[2], task, metric)
    if more is None:
        what = f"null, but it is not known whether a higher or lower {section.monitor} is better"
        columns = f"; a metric's columns are called {', '.join(metric)}, or NAME_KEY where it has several" if metric else ""
        return {}, [Problem(f"{key}.mode", what, f"min or max{columns}")]
    return {"mode": "max" if more else "min"}, []


def _is_more_better(name: str, task: Node, metric: Mapping[str, Node]) -> bool | None:
    if name == "loss":
        return False
    known: Any = {}
    try:
        known = getattr(locate(str(task.get("_target_"))), "higher_is_better", {})
        own = [other for other in metric if name == other or name.startswith(f"{other}_")]
        if own:
            longest = max(own, key=len)
            found: bool | None = components.metrics({longest: metric[longest]})[longest].higher_is_better
            return found
    except ValueError:  # reported elsewhere
        return None
    return known.get(name, True if name in MAXIMISED else None) if isinstance(known, Mapping) else None


def metric_names(task: Node) -> list[str] | None:
    """Return the names that a task's `metrics` and `derived` return; None if the source code does not list them directly."""
    try:
        found = locate(str(task.get("_target_")))
    except ValueError:
        return None
    if not hasattr(found, "metrics"):
        return None
    names: list[str] = []
    for method in (getattr(found, name) for name in ("metrics", "derived") if hasattr(found, name)):
        if (returned := _returned(method)) is None:
            return None
        names += returned
    return list(dict.fromkeys(names)) or None


def _returned(method: Callable[..., Any]) -> list[str] | None:
    """Return the keys of the dictionaries that a method returns, if they are literals."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):
        return None
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    keys = [key for value in values if isinstance(value, ast.Dict) for key in value.keys]
    names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    is_plain = all(isinstance(value, ast.Dict) for value in values) and len(names) == len(keys)
    return names if is_plain else None
