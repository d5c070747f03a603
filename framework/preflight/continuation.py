"""The second of a rehearsal's short runs: it continues the first from its checkpoints, without earlier computations."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from framework.build.training import Builder
from framework.engine.seam import Step
from framework.preflight.differences import Place, other_column, untouched
from framework.preflight.player import SINGLE, Player
from framework.preflight.refused import Refused, blamed
from framework.preflight.sketches import Sketch, other_sketch, sketch
from framework.preflight.training_samples import KEYED, TrainingSamples, batch_tensors, differs_when_loaded, same_tensors
from framework.preflight.two_steps import gradients_of, weights_of
from framework.runs.metrics_file import Row
from framework.runtime.problem import Problem

_BUFFER = {  # the remedies for values that change from step to step
    "model": "register_buffer() it in the model",
    "task": "register_buffer() it in the task (an nn.Module), or in the model",
    "optimizer": "keep it in optimizer.state or in param_groups",
    "metric": "a metric with a reset() that clears its whole state",
    "part": "return it from state_dict(), and restore it in load_state_dict()",
}
_OUTSIDE = {
    "model": "something outside its parameters and persistent buffers",
    "task": "something outside its buffers",
    "optimizer": "something outside its state and its parameter groups",
    "metric": "something from evaluation to evaluation",
    "part": "something outside its state",
}
_LOST = "{} changes from step to step, and no checkpoint holds it"
_RESTORED = "restored from a checkpoint"
BEFORE = 2  # steps before the save: after the first step, an average of the weights equals the weights
_LATE = 999_999, 1_000_000  # numbers of late steps
_ROUNDING = 1e-4  # of a column of a training row; an evaluation is more exact


def validation_tensors(build: Builder) -> list[Tensor]:
    """Return the first batch of each validation split."""
    found = list[Tensor]()
    for split in build.splits().validations():
        with blamed("dataset", f"its split {split} cannot be fetched", "see dataset.*"):
            loader = build.loader(build.source(split), split, dp_rank=0, dp_size=1)
            loader.num_workers = 0
            found += batch_tensors(next(loader.evaluate()))
    return found


class Continued(NamedTuple):
    """What a trainer computes after a checkpoint: a step, more steps by the same gradients, and an evaluation; each by name."""

    path: str  # of the checkpoint
    before: dict[Place, str]  # the numbers in plain attributes, by key and path
    step: dict[str, Sketch]  # its sums, its gradients and, after it, the buffers
    row: Row
    num_more: int
    weights: dict[str, Sketch]
    evaluation: Row
    weights_after: dict[str, Sketch]  # a part may have changed them
    numbers: dict[Place, str]

    @classmethod
    def of(cls, player: Player, path: str, step: Step, *, num_more: int, within_s: float) -> "Continued":
        """Let a player take this step, `num_more` steps by its gradients (fewer if they take long), and evaluate."""
        before = player.numbers()
        player.take(step)
        found = {f"the {name}": sketch(value) for sums in player.watch.sums.values() for name, value in sums.items()}
        found |= {f"the gradient of {name}": value for name, value in gradients_of(player).items()}
        found |= {name: sketch(buffer) for name, buffer in player.module.named_buffers()}
        num_more = player.repeat(step, num_more, within_s=within_s)
        weights = weights_of(player)
        player.evaluate(shares=[1.5])
        return cls(
            path, before, found, player.rows[-2], num_more, weights, player.rows[-1], weights_of(player), player.numbers()
        )


def in_bytes(tensors: list[Tensor]) -> list[Any]:
    """Return tensors as plain data, for another process."""
    flat = [(tensor, tensor.detach().contiguous().reshape(-1).view(torch.uint8)) for tensor in tensors]
    return [(str(tensor.dtype).removeprefix("torch."), [*tensor.shape], data.numpy().tobytes()) for tensor, data in flat]


def _of_bytes(plain: list[Any]) -> list[Tensor]:
    numbers = [torch.tensor(np.frombuffer(data, np.uint8)) for _, _, data in plain]
    return [flat.view(getattr(torch, dtype)).reshape(shape) for flat, (dtype, shape, _) in zip(numbers, plain)]


class Continuation:
    """The second run. Nothing may have been computed before in its process."""

    def __init__(self, build: Builder) -> None:
        self._build = build.altered(parallel=SINGLE)

    def compare(self, left: Sequence[Any]) -> list[Problem]:
        """Raise Refused for what is different from the first run, which has left this; return warnings."""
        other_validation, other_later, outcomes = _of_bytes(left[0]), _of_bytes(left[1]), [Continued(*one) for one in left[2]]
        validation = validation_tensors(self._build)
        self._samples = samples = TrainingSamples(self._build)
        later, self._following = samples.later(), samples.step(BEFORE)
        samples.compare(later, other_later)
        if not same_tensors(validation, other_validation):
            raise differs_when_loaded("val")
        return [finding for outcome in outcomes for finding in self._compare(outcome)][:1]

    def _new_player(self) -> Player:
        return Player(self._build, sources={"train": self._samples.source})

    def _go_on(self, outcome: Continued, player: Player, *, late: Mapping[Place, int] = MappingProxyType({})) -> Continued:
        """Let a player do from the checkpoint what has led to this outcome, but with these numbers in plain attributes."""
        player.restore(Path(outcome.path))
        for place, number in late.items():
            player.replace_number(place, number)
        return Continued.of(player, outcome.path, self._following, num_more=outcome.num_more, within_s=math.inf)

    def _again(self, outcome: Continued) -> dict[str, Sketch]:
        """Let the last player do its step again. It keeps no buffer that a checkpoint does not hold."""
        with untouched(self._player.module, self._player.engine.task):
            return self._go_on(outcome, self._player).step

    def _compare(self, ours: Continued) -> list[Problem]:
        """Refuse what computes something else after a restore: a step, its updates, or an evaluation; return warnings."""
        self._ours, self._player = ours, self._new_player()
        self._theirs = theirs = self._go_on(ours, self._player)
        if differing := other_sketch(ours.step, theirs.step):
            one, again = (self._again(ours) for _ in range(2))
            varies = other_sketch(one, again) != ""
            how = "the same step gives different results each time" if varies else f"{_RESTORED}, it computes different results"
            why = "it draws from its own generator, depends on the time, or counts outside of its modules" if varies else ""
            cure = f"draw {KEYED}; register_buffer() a count" if varies else ""
            self._refuse(("model", "task"), f"{how} (first seen in {differing})", why=why, cure=cure)
        self._compare_updates(ours, theirs)
        self._compare_evaluations(ours, theirs)
        return self._compare_numbers(ours, theirs)

    def _compare_numbers(self, ours: Continued, theirs: Continued) -> list[Problem]:
        """Refuse a number in a plain attribute that is not restored, if it decides anything; otherwise return a warning."""
        lost = [place for place in self._changed() if ours.numbers[place] != theirs.numbers.get(place)]
        again = self._go_on(ours, self._new_player()) if lost else theirs
        lost = [place for place in lost if theirs.numbers.get(place) == again.numbers.get(place)]  # a time differs again
        alone = [place for place in lost if not place.is_deep]
        if alone and self._decide(alone, again):
            key, name, _ = next((place for place in alone if self._decide([place], again)), alone[0])
            raise Refused(key, _LOST.format(name), _BUFFER[key.partition(".")[0]])
        then = "if a step reads it, a continued run computes other results"
        return [Problem(key, f"{_LOST.format(name)}: {then}", _BUFFER[key.partition(".")[0]], is_warning=True)
                for key, name, _ in lost[:1]]  # fmt: skip

    def _decide(self, places: Sequence[Place], again: Continued) -> bool:
        """Return whether anything is computed otherwise with the numbers of late steps at these places; of a tensor: yes.

        An average, in a tensor, is kept to be read.
        """
        theirs, rows = self._theirs, {"row": _ROUNDING, "evaluation": 1e-5}
        for number in _LATE:
            try:
                late = self._go_on(self._ours, self._new_player(), late=dict.fromkeys(places, number))
            except Exception:  # of code that reads them
                return True
            sketches = [(theirs.step, late.step), (theirs.weights, late.weights), (theirs.weights_after, late.weights_after)]
            columns = (other_column(getattr(late, row), getattr(theirs, row), but_not=getattr(again, row), tolerance=tolerance)
                       for row, tolerance in rows.items())  # fmt: skip
            if any(other_sketch(*pair) for pair in sketches) or any(columns):
                return True
        return False

    def _changed(self) -> list[Place]:
        return [place for place, value in self._ours.numbers.items() if self._ours.before.get(place) != value]

    def _compare_updates(self, ours: Continued, theirs: Continued) -> None:
        if differing := other_sketch(ours.weights, theirs.weights):
            who = [type(self._player.update.optimizer).__name__, *(f"part.{name}" for name in self._player.parts.by_name)]
            self._refuse(("optimizer", "part"), f"{_RESTORED}, {' or '.join(who)} takes a different step (of {differing})")
        if other_column(ours.row, theirs.row, tolerance=_ROUNDING):
            again = self._go_on(ours, self._new_player()).row
            if column := other_column(ours.row, theirs.row, but_not=again, tolerance=_ROUNDING):
                self._refuse(("part",), f"{_RESTORED}, its column {column} is another one")

    def _compare_evaluations(self, ours: Continued, theirs: Continued) -> None:
        if differing := other_column(ours.evaluation, theirs.evaluation, tolerance=1e-5):
            metrics = self._player.trainer.tracker.metrics.by_name
            is_metric = any(differing == name or differing.startswith(f"{name}_") for name in metrics)
            self._refuse(
                ("metric",) if is_metric else ("model", "task"), f"{_RESTORED}, an evaluation gives a different {differing}"
            )
        if differing := other_sketch(ours.weights_after, theirs.weights_after):
            self._refuse(("part",), f"{_RESTORED}, after an evaluation it gives {differing} other values")

    def _refuse(self, keys: Sequence[str], what: str, *, why: str = "", cure: str = "") -> NoReturn:
        """Refuse an object of one of these kinds, if possible with an attribute that has changed, and was not restored."""
        before, restored = self._ours.before, self._theirs.before
        lost = [place for place in self._changed() if before.get(place) != restored.get(place)]
        key, name, _ = next(
            (place for kind in keys for place in lost if place.key.partition(".")[0] == kind), Place(keys[0], "")
        )
        kind = key.partition(".")[0]
        if key == "part":
            key = ", ".join(f"part.{part}" for part in self._player.parts.by_name)
        if name:
            why, cure = f"{name} changes, and no checkpoint holds it", _BUFFER[kind]
        raise Refused(key, f"{what}: {why or 'it keeps ' + _OUTSIDE[kind]}", cure or _BUFFER[kind])
