"""Turns: sets of parameters with their own optimizers; a step takes the turns one after the other."""

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from framework.modules.parts import nearest_name
from framework.optim.optimizers import BuildOptimizer, Trainable, stand_in


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A set of parameters, by patterns of their names, and when and how a step moves them."""

    name: str
    match: Sequence[str]
    every: int = 1  # every so many steps; other steps leave this turn out
    clip_grad_norm: float | None = None  # null: use trainer.clip_grad_norm
    scheduler: dict[str, Any] | None = None  # the node of a schedule; null: use the run's schedule
    optimizer: dict[str, Any]  # the node of its optimizer: the run's optimizer with the turn's options, or the turn's own

    def is_due(self, step: int) -> bool:
        """Return whether a step, counted from 0, takes this turn."""
        return (step + 1) % self.every == 0

    def has(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.match)


def turns_of(node: Mapping[str, Any]) -> list[Turn]:
    """Return the turns of an optimizer's node, in order; an empty list if there are none. ValueError that names the key."""
    named = node.get("turns") or {}
    shared = {name: value for name, value in node.items() if name != "turns"}
    if not isinstance(named, Mapping):
        raise ValueError(f"turns: {named!r} is not valid (turns by name, as in {{critic: {{match: [critic.*]}}}})")
    turns = []
    for name, entry in named.items():
        match = entry.get("match") if isinstance(entry, Mapping) else None
        if not isinstance(entry, Mapping) or not isinstance(match, (str, list)) or not match:
            raise ValueError(f"turns.{name}: {entry!r} is not valid (match: patterns of parameters' names, and options)")
        every, clip = entry.get("every", 1), entry.get("clip_grad_norm")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"turns.{name}.every: {every!r} is not valid (a number of steps, at least 1)")
        if clip is not None and (isinstance(clip, bool) or not isinstance(clip, (int, float)) or clip <= 0):
            raise ValueError(f"turns.{name}.clip_grad_norm: {clip!r} is not valid (a number above 0, or null)")
        own = {key: value for key, value in entry.items() if key not in ("match", "every", "clip_grad_norm")}
        schedule = own.pop("scheduler", None)
        patterns = [match] if isinstance(match, str) else list(match)
        turns.append(Turn(name=str(name), match=patterns, every=every, clip_grad_norm=clip, scheduler=schedule,
                          optimizer=own if "_target_" in own else shared | own))  # fmt: skip
    return turns


def check_turns(turns: Sequence[Turn], *, names: Sequence[str]) -> None:
    """Raise ValueError unless each trained parameter belongs to exactly one turn, and each pattern matches a parameter."""
    for turn in turns:
        for pattern in turn.match:
            if not fnmatch.filter(names, pattern):
                near = nearest_name(pattern, names)
                raise ValueError(f"turns.{turn.name}.match: {pattern} matches no parameter that is trained ({near})")
    if not any(turn.every == 1 for turn in turns):
        raise ValueError("turns: some steps would have no turn (every: 1 for one)")
    for name in names:
        having = [turn.name for turn in turns if turn.has(name)]
        if not having:
            raise ValueError(f"turns: no turn has {name} (name it in a turn, or in trainer.freeze)")
        if len(having) > 1:
            raise ValueError(f"turns: {' and '.join(having)} have {name} (one of them)")


class InTurns(torch.optim.Optimizer):
    """The optimizers of all turns as one optimizer; its `step` is the step of `turn`. They share one state, by parameter."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self.turn = next(iter(optimizers))
        super().__init__([group for optimizer in optimizers.values() for group in optimizer.param_groups], {})
        self._share()

    @property
    def turns_of_groups(self) -> list[str]:
        """The turn of each parameter group."""
        return [name for name, optimizer in self.optimizers.items() for _ in optimizer.param_groups]

    def step(self, closure: Any = None) -> Any:
        return self.optimizers[self.turn].step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        start = 0
        for optimizer in self.optimizers.values():
            end = start + len(optimizer.param_groups)
            optimizer.param_groups, optimizer.state = self.param_groups[start:end], self.state
            start = end


def in_turns(turns: Sequence[Turn], build: Callable[[dict[str, Any]], BuildOptimizer]) -> BuildOptimizer:
    """Return a function that builds the optimizers of all turns; `build` returns the builder for a turn's node."""
    builders = {turn.name: build(turn.optimizer) for turn in turns}

    def make(trained: list[Trainable]) -> torch.optim.Optimizer:
        device = trained[0].parameter.device
        mine = {turn.name: [item for item in trained if turn.has(item.name)] for turn in turns}
        return InTurns({name: builders[name](items or stand_in(device)) for name, items in mine.items()})

    return make


def groups_of(optimizer: torch.optim.Optimizer, own: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the parameter groups of each turn in `own`; the other groups have the name ""."""
    names = optimizer.turns_of_groups if isinstance(optimizer, InTurns) else [""] * len(optimizer.param_groups)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("", *own)}
    for group, name in zip(optimizer.param_groups, names):
        found[name if name in own else ""].append(group)
    return found
