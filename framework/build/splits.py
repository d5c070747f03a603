"""The splits of a dataset: several validation sets, folds, and what a stream of training samples does not have.

`dataset.val` may have a node for each of several names. The first is the split `val`, another one `val.NAME`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from framework.config.period import epochs_of
from framework.config.schema import OF_DATA, Node
from framework.config.trainer import TrainerSection
from framework.config.validation import component_problems
from framework.data.source import Dataset, Selected, Source, Split
from framework.randomness import permutation
from framework.runtime.exits import Unfit
from framework.runtime.problem import Problem


def validations(node: Node) -> dict[str, Node]:
    """Return the dataset's node for each of its validation splits, in their order."""
    found = {f"val.{name}" if number else "val": node | {"val": one} for number, (name, one) in enumerate(_named(node).items())}
    return found or {"val": node}


def names_of_validations(node: Node, *, built: Dataset) -> list[Split]:
    """Return the names of the validation splits, also of a dataset that has several itself: then its data are loaded."""
    own = getattr(built, "validations", ()) if node.get("folds") is None else ()
    return [*(own or validations(node))]


def validation(dataset: Node, split: str) -> Node:
    """Return the dataset's node for one validation split. Unfit if there is none of this name."""
    found = validations(dataset)
    if split not in found:
        raise Unfit(f"{split}: is no split of this dataset (one of train, {', '.join(found)}, test)")
    return found[split]


def dataset_problems(dataset: Node, *, known: list[str]) -> list[Problem]:
    """Return the problems of the dataset's arguments, also of each validation set."""
    found = dict[str, Problem]()
    try:
        keys = [f"dataset.val.{name}" for name in _named(dataset)] or ["dataset.val"]
        for key, node in zip(keys, validations(dataset).values()):
            for problem in component_problems("dataset", node, known=known, own=OF_DATA, may_hide=True):
                place, expected = (re.sub(r"\bdataset\.val\b", key, text) for text in (problem.key, problem.expected))
                found.setdefault(place, replace(problem, key=place, expected=expected))
    except ValueError as error:
        return [Problem.of_line(str(error))]
    return [*found.values()]


def _named(node: Node) -> dict[str, Node]:
    named = node.get("val")
    if not isinstance(named, dict) or "_target_" in named:
        return {}
    if not any(isinstance(one, dict) and "_target_" in one for one in named.values()):
        return {}  # the user's own dataset has an argument of this name
    if odd := [name for name in named if not re.fullmatch(r"\w+", str(name))]:
        raise ValueError(f"dataset.val.{odd[0]}: is not valid (a name of letters, digits and _)")
    if node.get("folds") is not None or not all(isinstance(one, dict) and "_target_" in one for one in named.values()):
        raise ValueError("dataset.val: has names (each with a node that has a _target_; and without dataset.folds)")
    return named


def in_fold(source: Source, split: Split, *, number: int, count: int) -> Source:
    """Return one fold of the training samples for `val`, and the others for `train`. Unfit for a stream."""
    if hasattr(source, "is_stream"):
        raise Unfit("dataset.folds: a stream has no folds (dataset.val and dataset.length)")
    order = permutation(len(source))  # the same for every seed
    mine = order[number::count] if split == "val" else np.delete(order, np.s_[number::count])
    return Selected(source, np.sort(mine))


def check_stream(
    source: Source, sampler: Node, settings: TrainerSection, saved_every: Any, scheduler: Mapping[str, Any]
) -> None:
    """Raise Unfit if a run wants what its stream of training samples does not have: another order, or epochs."""
    from framework.data.stream import ENDLESS

    if sampler:
        raise Unfit("sampler: a stream of training samples has its own order (sampler=permutation leaves it)")
    periods = {"trainer.eval_every": settings.eval_every, "checkpoint.every": saved_every}
    periods |= {f"scheduler.{name}": value for name, value in scheduler.items()}
    by_epochs = [name for name, value in periods.items() if epochs_of(value) is not None]
    if len(source) == ENDLESS and (by_epochs or settings.max_steps is None):
        what = f"{[*by_epochs, 'trainer.max_epochs'][0]} counts epochs, and the stream of training samples has no length"
        raise Unfit(f"{what} (dataset.length.train=N, or a number of steps: trainer.max_steps)")
