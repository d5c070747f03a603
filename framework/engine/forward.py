"""The run of one micro-batch through the model."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.engine.of_samples import naming, require_rows
from framework.engine.seam import MicroBatch, Observe, Task, says_itself, weigh_gradients
from framework.engine.sums import Sums, Value, as_sums, loss_in
from framework.modules.tensors import Tree, call, map_tensors
from framework.randomness import key, seed_generators
from framework.runtime.exits import Unfit


class Draws(NamedTuple):
    """The key of a micro-batch's random draws, and how often its step has called the model (0 without own calls)."""

    at: tuple[int | str, ...]
    num_calls: int = 0

    @property
    def key(self) -> tuple[int | str, ...]:
        return self.at if self.num_calls <= 1 else (*self.at, "call", self.num_calls)


@dataclass(eq=False)
class Forward:
    """The run of one micro-batch through the model: it seeds random draws, applies autocast and returns sums over samples."""

    task: Task
    _: KW_ONLY
    seed: int
    devices: Sequence[torch.device]  # of the model
    autocast: torch.dtype | None
    example: Tensor | None = None  # the inputs of two samples, without storage; None if their kind is not known
    observers: list[Observe] = field(default_factory=list)  # as Engine.observers
    is_padding: bool = field(default=False, init=False)  # of the current micro-batch; for layers that use other ranks' samples
    draws: Draws = field(default=Draws(()), init=False)  # the random draws of the current micro-batch's units depend on this

    def __post_init__(self) -> None:
        self.device = self.devices[0]
        self.module = self.task if isinstance(self.task, nn.Module) else None  # the task's module
        self.trains_by_step = callable(getattr(self.task, "step", None))
        self._takes_16_bits = says_itself(self.task, "takes_16_bits")
        self.measures_by_step = self.trains_by_step and not measures(self.task)

    def seed_draws(self, *phase: str, step: int | None, micro_batch: int, turn: str = "") -> None:
        """Seed the model's random draws by step and micro-batch, not by rank. Step None: an evaluation."""
        at: tuple[int | str, ...] = ("forward", step, micro_batch) if step is not None else ("evaluation", micro_batch)
        self.draws = Draws((*at, *(("turn", turn) if turn else ()), *phase))
        self._seed(*self.draws.key)

    def begin_call(self) -> None:
        """Let the units draw other numbers than in an earlier call for the same micro-batch."""
        self.draws = self.draws._replace(num_calls=self.draws.num_calls + 1)

    def key_draws(self, units: Sequence[nn.Module]) -> None:
        """Seed the draws of each unit, and the draws after the last unit, also by its number, so not by rank in a pipeline."""

        def seed_unit(*_: object, number: int) -> None:
            self._seed(*self.draws.key, number)

        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(functools.partial(seed_unit, number=number))
        if units:
            units[-1].register_forward_hook(functools.partial(seed_unit, number=len(units)))

    def _seed(self, *parts: int | str) -> None:
        seed_generators(key(self.seed, *parts), devices=self.devices)

    def __call__(self, model: Callable[..., Any], micro_batch: MicroBatch, *, measure: bool) -> tuple[Tensor, Sums]:
        """Return the sum of the losses, for the backward pass, and all sums, with `measure` also those of the metrics."""
        self.is_padding = micro_batch.is_padding
        with naming(micro_batch):
            outputs = self.for_loss(lambda: call(model, micro_batch.inputs))
        return self.measured(outputs, micro_batch, measure=measure)

    def outputs(self, model: Callable[..., Any], micro_batch: MicroBatch) -> Tree:
        """Return the model's outputs."""
        self.is_padding = micro_batch.is_padding
        with naming(micro_batch):
            return self.in_precision(lambda: call(model, micro_batch.inputs))

    def measured(self, outputs: Tree, micro_batch: MicroBatch, *, measure: bool) -> tuple[Tensor, Sums]:
        """Return the loss and the sums, as a call of this object does, for outputs that already exist."""
        with naming(micro_batch, narrowed=lambda part: self.task.loss(part(outputs), part(micro_batch.targets))):
            loss, weight = self.task.loss(outputs, micro_batch.targets), loss_weight_of(self.task)
            if weight is not None and isinstance(loss, tuple):
                raise TypeError("loss() returns a pair, but the task has loss_weight() (return the sum; or loss_weight = None)")
            both: Any = loss if weight is None else (loss, weight(micro_batch.targets))
            values: dict[str, Value] = {"loss": both}
        if measure and (metrics := getattr(self.task, "metrics", None)) is not None:
            measured = metrics(map_tensors(Tensor.detach, outputs), micro_batch.targets)
            if "loss" in measured:
                raise Unfit("task: its metrics() returns a value with the name of the loss (use a new name)")
            values |= measured
        sums = as_sums(values)
        require_rows(sums, micro_batch)
        return loss_in(values), sums

    @property
    def _weight(self) -> Callable[[Any], Any] | None:
        """The weight of a loss, known before the forward, of a task that trains by its loss."""
        return None if self.trains_by_step else loss_weight_of(self.task)

    def factor(
        self, micro_batches: Sequence[MicroBatch], *, scale: float, num_samples: int, among_ranks: bool = True
    ) -> Tensor | float:
        """Return the factor of a step's losses: `scale`, divided by the weight of the global batch or the number of samples.

        `micro_batches` are those of this rank that count. With `among_ranks`, the weights of all ranks are added. Collective.
        """
        if self._weight is None:
            return scale / num_samples
        weight = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro_batch in micro_batches:
            weight += self._weight(micro_batch.targets)
        if among_ranks and dist.is_initialized():
            dist.all_reduce(weight)
        return torch.where(weight > 0, scale / weight, 0.0)

    def settle(self, module: nn.Module, sums: Sums, *, num_samples: int, among_ranks: bool = True) -> None:
        """Divide the gradients by the weight of the loss, if only its result tells the weight. Collective."""
        if self._weight is None:
            weigh_gradients(module, sums, num_samples=num_samples, among_ranks=among_ranks and dist.is_initialized())

    def evaluated(self, outputs: Tree, micro_batch: MicroBatch) -> Sums:
        """Return all sums of a micro-batch with a weight above zero, in an evaluation."""
        _, sums = self.measured(outputs, micro_batch, measure=True)
        for observe in self.observers:
            observe(outputs, micro_batch)
        return sums

    def for_loss(self, compute: Callable[[], Tree]) -> Tree:
        """Return the result of `compute` in the dtype that the task's loss takes: float32, or the dtype of autocast."""
        return self.under_autocast(compute) if self._takes_16_bits else self.in_precision(compute)

    def in_precision(self, compute: Callable[[], Tree]) -> Tree:
        """Return the result of `compute`, computed under autocast if autocast is on, and then converted to float32."""
        outputs = self.under_autocast(compute)
        if self.autocast is None:
            return outputs
        return map_tensors(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, outputs)

    def under_autocast(self, compute: Callable[[], Tree]) -> Tree:
        """Return the result of `compute`, in the dtypes in which it is computed."""
        if self.autocast is None:
            return compute()
        with torch.autocast(self.device.type, dtype=self.autocast):
            return compute()


def loss_weight_of(task: object) -> Callable[[Any], Any] | None:
    """Return the task's function from targets to the weight of its loss, if it has one."""
    found = getattr(task, "loss_weight", None)
    return found if callable(found) else None


def measures(task: object) -> bool:
    """Return whether a task defines how to measure outputs; if not, an evaluation runs the task's step too."""
    has = {name: callable(getattr(task, name, None)) for name in ("loss", "metrics", "step")}
    return has["loss"] and (has["metrics"] or not has["step"])


def modules_of(task: object) -> dict[str, nn.Module]:
    """Return the modules of a task (such as a teacher) by attribute name; if the task is a module, return the task itself."""
    if isinstance(task, nn.Module):
        return {"": task}
    return {name: value for name, value in getattr(task, "__dict__", {}).items() if isinstance(value, nn.Module)}
