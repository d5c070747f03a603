"""Parameter groups: which options of the optimizer hold for which parameters, by patterns of their names."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from framework.modules.structure import nearest
from framework.modules.tensors import by_mesh


class Trainable(NamedTuple):
    """A parameter that wants a gradient: whole, or this rank's shard."""

    name: str  # in the model
    parameter: nn.Parameter
    is_hidden: bool  # a matrix between the first and the last layer of the whole model
    is_decayed: bool  # subject to weight decay: not a bias, not of a normalisation layer


BuildOptimizer = Callable[[list[Trainable]], torch.optim.Optimizer]
MakeOptimizer = Callable[[BuildOptimizer, list[Trainable]], torch.optim.Optimizer]  # a strategy's way of building one
Rule = tuple[Callable[[Trainable], bool], Mapping[str, Any]]


def rules_of(groups: Sequence[Mapping[str, Any]]) -> list[Rule]:
    """Return the rules of `optimizer.groups`: each `{match: PATTERN or PATTERNS, OPTION: VALUE, ...}`.

    ValueError for an entry of another form.
    """
    rules: list[Rule] = []
    for number, entry in enumerate(groups):
        if not isinstance(entry, Mapping) or "match" not in entry or len(entry) < 2:
            raise ValueError(f"groups={entry}: entry {number} needs a pattern of names and an option, as in "
                             '{match: "*.bias", weight_decay: 0}')  # fmt: skip
        options = {name: value for name, value in entry.items() if name != "match"}
        rules.append((partial(_is_matched, patterns=_patterns(entry)), options))
    return rules


def _patterns(entry: Mapping[str, Any]) -> list[str]:
    return [entry["match"]] if isinstance(entry["match"], str) else list(entry["match"])


def _is_matched(item: Trainable, *, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(item.name, pattern) for pattern in patterns)


def require_matches(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raise ValueError for a pattern of `optimizer.groups` that matches none of the model's parameters."""
    for entry in groups:
        for pattern in _patterns(entry):
            if not fnmatch.filter(names, pattern):
                raise ValueError(f"groups={pattern}: matches no parameter that is trained ({nearest(pattern, names)})")


def param_groups(trained: Sequence[Trainable], rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Return torch's parameter groups: each parameter with the options of the rules that hold for it.

    Where several set the same option, the first one counts. No group mixes shards of different meshes.
    """
    groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for item in trained:
        holding = tuple(number for number, (holds, _) in enumerate(rules) if holds(item))
        groups.setdefault(holding, []).append(item.parameter)
    found = []
    for holding, parameters in groups.items():
        options = {name: value for number in reversed(holding) for name, value in rules[number][1].items()}
        found += [{"params": members, **options} for members in by_mesh(parameters)]
    return found
