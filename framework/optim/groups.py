"""Parameter groups: which options of the optimizer hold for which parameters, by patterns of their names."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from framework.modules.structure import nearest_name
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
    for entry in groups if isinstance(groups, list) else [str(groups)]:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("match"), (str, list)) or len(entry) < 2:
            raise ValueError(f"groups={entry}: is not valid (a list of entries with names and options, as in "
                             '[{match: "*.bias", weight_decay: 0}])')  # fmt: skip
        options = {name: value for name, value in entry.items() if name != "match"}
        rules.append((partial(_is_matched, _patterns(entry)), options))
    return rules


def _patterns(entry: Mapping[str, Any]) -> list[str]:
    return [entry["match"]] if isinstance(entry["match"], str) else list(entry["match"])


def _is_matched(patterns: list[str], item: Trainable) -> bool:
    return any(fnmatch.fnmatchcase(item.name, pattern) for pattern in patterns)


def check_groups(groups: Sequence[Mapping[str, Any]], *, names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise ValueError where `optimizer.groups` does not fit the parameters' names or the optimizer's options (with values)."""
    rules_of(groups)
    for entry in groups:
        for option in entry.keys() - {"match"}:
            if option not in options:
                raise ValueError(f"groups={option}: unknown option ({nearest_name(option, list(options))})")
            if isinstance(options[option], (int, float)) and not isinstance(entry[option], (int, float)):
                raise ValueError(f"groups={option}: {entry[option]!r} is not valid (a number, as in {options[option]})")
        for pattern in _patterns(entry):
            if not fnmatch.filter(names, pattern):
                raise ValueError(f"groups={pattern}: matches no parameter that is trained ({nearest_name(pattern, names)})")


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
