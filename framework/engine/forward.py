"""One micro-batch through the model."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from framework.engine.seam import MicroBatch, Observe, Task, says_itself
from framework.engine.sums import Sums, as_sums
from framework.modules.tensors import Tree, call, map_tensors
from framework.randomness import key, seed_generators


class Draws(NamedTuple):
    """Which micro-batch draws, and how often its step has called the model: once, unless it says so."""

    at: tuple[int | str, ...]
    num_calls: int = 0

    @property
    def key(self) -> tuple[int | str, ...]:
        return self.at if self.num_calls <= 1 else (*self.at, "call", self.num_calls)


@dataclass(eq=False)
class Forward:
    """One micro-batch through the model: random draws keyed, autocast on, sums over samples out."""

    task: Task
    _: KW_ONLY
    seed: int
    devices: Sequence[torch.device]  # of the model
    autocast: torch.dtype | None
    example: Tensor | None = None  # the inputs of two samples, without storage; None if their kind is not known
    observers: list[Observe] = field(default_factory=list)  # as Engine.observers
    is_padding: bool = field(default=False, init=False)  # the current micro-batch; for layers that use other ranks' samples
    draws: Draws = field(default=Draws(()), init=False)  # what the draws of the current micro-batch's units depend on

    def __post_init__(self) -> None:
        self.device = self.devices[0]
        self.module = self.task if isinstance(self.task, nn.Module) else None  # the task's
        self.trains_by_step = callable(getattr(self.task, "step", None))
        self._takes_16_bits = says_itself(self.task, "takes_16_bits")
        self.measures_by_step = self.trains_by_step and not measures(self.task)

    def seed_draws(self, *, step: int | None, micro_batch: int, turn: str = "") -> None:
        """Seed what the model draws by step and micro-batch, not by rank. Step None: an evaluation."""
        at: tuple[int | str, ...] = ("forward", step, micro_batch) if step is not None else ("evaluation", micro_batch)
        self.draws = Draws((*at, "turn", turn) if turn else at)
        self._seed(*self.draws.key)

    def begin_call(self) -> None:
        """Let the units draw other numbers than in an earlier call for the same micro-batch."""
        self.draws = self.draws._replace(num_calls=self.draws.num_calls + 1)

    def key_draws(self, units: Sequence[nn.Module]) -> None:
        """Seed the draws of each unit, and of what follows the last, by its number too: in a pipeline, not by its rank."""

        def seed_unit(*_: object, number: int) -> None:
            self._seed(*self.draws.key, number)

        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(functools.partial(seed_unit, number=number))
        if units:
            units[-1].register_forward_hook(functools.partial(seed_unit, number=len(units)))

    def _seed(self, *parts: int | str) -> None:
        seed_generators(key(self.seed, *parts), devices=self.devices)

    def __call__(self, model: Callable[..., Any], micro_batch: MicroBatch, *, measure: bool) -> tuple[Tensor, Sums]:
        """Return the sum of the losses, of which to take the gradient, and all sums: with `measure` also the metrics."""
        self.is_padding = micro_batch.is_padding
        return self.measured(self.for_loss(lambda: call(model, micro_batch.inputs)), micro_batch, measure=measure)

    def outputs(self, model: Callable[..., Any], micro_batch: MicroBatch) -> Tree:
        """Return what the model returns."""
        self.is_padding = micro_batch.is_padding
        return self.in_precision(lambda: call(model, micro_batch.inputs))

    def measured(self, outputs: Tree, micro_batch: MicroBatch, *, measure: bool) -> tuple[Tensor, Sums]:
        """Return the same for outputs that are there already."""
        loss = self.task.loss(outputs, micro_batch.targets)
        sums = as_sums({"loss": loss})
        if measure and (metrics := getattr(self.task, "metrics", None)) is not None:
            sums |= as_sums(metrics(map_tensors(Tensor.detach, outputs), micro_batch.targets))
        return loss[0] if isinstance(loss, tuple) else loss, sums

    def evaluated(self, outputs: Tree, micro_batch: MicroBatch) -> Sums:
        """Return all sums of a micro-batch that counts, in an evaluation."""
        _, sums = self.measured(outputs, micro_batch, measure=True)
        for observe in self.observers:
            observe(outputs, micro_batch)
        return sums

    def for_loss(self, compute: Callable[[], Tree]) -> Tree:
        """Return what `compute` returns in the type that the task's loss takes: float32, or autocast's own."""
        return self.under_autocast(compute) if self._takes_16_bits else self.in_precision(compute)

    def in_precision(self, compute: Callable[[], Tree]) -> Tree:
        """Return what `compute` returns: computed under autocast, if that is on, and then in float32."""
        outputs = self.under_autocast(compute)
        if self.autocast is None:
            return outputs
        return map_tensors(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, outputs)

    def under_autocast(self, compute: Callable[[], Tree]) -> Tree:
        """Return what `compute` returns, in the types in which it is computed."""
        if self.autocast is None:
            return compute()
        with torch.autocast(self.device.type, dtype=self.autocast):
            return compute()


def measures(task: object) -> bool:
    """Return whether a task says how outputs are measured; if not, its step is what an evaluation runs too."""
    has = {name: callable(getattr(task, name, None)) for name in ("loss", "metrics", "step")}
    return has["loss"] and (has["metrics"] or not has["step"])


def modules_of(task: object) -> dict[str, nn.Module]:
    """Return the modules of a task, such as a teacher, by the names of its attributes; of a task that is a module, itself."""
    if isinstance(task, nn.Module):
        return {"": task}
    return {name: value for name, value in getattr(task, "__dict__", {}).items() if isinstance(value, nn.Module)}
