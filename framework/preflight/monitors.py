"""The column that a run monitors, and whether more of it is better."""

from collections.abc import Mapping
from contextlib import suppress

from framework.build import components
from framework.build.splits import names_of_validations, validations
from framework.config.schema import Node
from framework.config.spelling import did_you_mean
from framework.config.targets import locate
from framework.config.trainer import CheckpointSection, EarlyStopping
from framework.runs.metrics_file import MAXIMISED
from framework.runtime.problem import Problem


def mode_of_monitor(
    section: CheckpointSection | EarlyStopping, key: str, *, task: Node, metric: Mapping[str, Node], dataset: Node
) -> tuple[str | None, list[Problem]]:
    """Return the `mode` of a section's monitor, also if it is null there. This imports the task.

    Refuse a split that is not evaluated, and a mode that nothing decides. An evaluation finds out whether the column exists.
    """
    evaluated = [*validations(dataset)]
    split, _, name = section.monitor.partition("/")
    if split.startswith("val."):
        try:
            evaluated = names_of_validations(dataset, built=components.dataset(dataset))
        except Exception as error:  # the user's data are loaded
            return None, [Problem.of_error("dataset", error)]
    known: dict[str, bool | None] = {"loss": False}
    with suppress(ValueError):  # reported elsewhere
        found = getattr(locate(str(task.get("_target_"))), "higher_is_better", None)
        known |= found if isinstance(found, Mapping) else dict.fromkeys(MAXIMISED, True)
    choices = [f"{one}/{column}" for one in (*evaluated, "train") for column in (*known, *(metric if one != "train" else ()))]
    close = f"; {meant}" if (meant := did_you_mean(section.monitor, choices)) else ""
    if not name or split not in (*evaluated, "train"):
        return None, [Problem(f"{key}.monitor", f"{section.monitor!r} is not valid", f"one of {', '.join(choices)}{close}")]
    if section.mode is not None:
        return section.mode, []
    more = known.get(name)
    if split != "train" and (own := [other for other in metric if name == other or name.startswith(f"{other}_")]):
        named, more = max(own, key=len), None
        with suppress(ValueError):  # reported elsewhere
            more = components.metrics({named: metric[named]})[named].higher_is_better
    if more is None:
        what = f"null, but it is not known whether a higher or lower {section.monitor} is better"
        columns = f"; a metric's columns are called {', '.join(metric)}, or NAME_KEY where it has several" if metric else ""
        return None, [Problem(f"{key}.mode", what, f"min or max{columns}{close}")]
    return "max" if more else "min", []
