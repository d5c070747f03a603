"""The run of one micro-batch through the model."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.engine.buffers import Buffers
from framework.engine.of_samples import TARGETS_REMEDY, name_samples, require_rows
from framework.engine.seam import MicroBatch, Observe, Step, Task, says_itself
from framework.engine.sums import Sums, Value, as_sums, loss_in, weight_of
from framework.modules.structure import only_dropouts
from framework.modules.tensors import WIDEST, Tree, by_mesh, call, map_tensors
from framework.randomness import key, seed_generators
from framework.runtime.exits import Unfit
from framework.runtime.torch_internals import multiply_all

_CPU = torch.device("cpu")
Factor = Callable[[], Tensor | float]  # returns the factor of a step's losses; it may wait for the weights of other ranks


@dataclass(eq=False)
class Forward:
    """The run of one micro-batch through the model: it seeds random draws, applies autocast and returns sums over samples."""

    task: Task
    _: KW_ONLY
    seed: int
    devices: Sequence[torch.device]  # of the model
    autocast: torch.dtype | None
    observers: list[Observe] = field(default_factory=list)  # get the outputs of each micro-batch of an evaluation, on one rank
    current: MicroBatch | None = field(default=None, init=False)  # set before any part of its forward or its loss
    at: tuple[int | str, ...] = field(default=(), init=False)  # the key of a pass's random draws; () between passes
    _num_calls: int = field(default=0, init=False)  # how often its step has called the model (0 without own calls)

    def __post_init__(self) -> None:
        self.device = self.devices[0]
        self.module = self.task if isinstance(self.task, nn.Module) else None  # the task's module
        self.trains_by_step = callable(getattr(self.task, "step", None))
        self._weight_of_loss = loss_weight_of(self.task)
        self._weight = None if self.trains_by_step else self._weight_of_loss  # known before the forward
        self._takes_16_bits = says_itself(self.task, "takes_16_bits")
        self.measures_by_step = self.trains_by_step and not measures(self.task)

    def seed_draws(self, *phase: str, step: int | None, micro_batch: int, turn: str = "") -> None:
        """Seed the model's random draws by step and micro-batch, not by rank. Step None: an evaluation."""
        at: tuple[int | str, ...] = ("forward", step, micro_batch) if step is not None else ("evaluation", micro_batch)
        self.at, self._num_calls = (*at, *(("turn", turn) if turn else ()), *phase), 0
        self.reseed()

    @property
    def is_padding(self) -> bool:
        """Whether the current micro-batch is padding; for layers that use other ranks' samples."""
        return self.current is not None and self.current.is_padding

    def begin_call(self) -> None:
        """Let the units draw other numbers than in an earlier call for the same micro-batch."""
        self._num_calls += 1

    def key_draws(self, units: Sequence[nn.Module], *, are_all: bool = False) -> None:
        """Seed the draws of each unit, and the draws after the last unit, also by its number, so not by rank in a pipeline.

        `are_all`: the units are the whole forward. Then a unit of torch's own layers, without dropout, is not seeded.
        """

        def seed_unit(*_: object, number: int, dropouts: Sequence[Any] | None) -> None:
            if self.at and (dropouts is None or any(layer.p for layer in dropouts)):
                self.reseed(number)

        layers = [only_dropouts(unit) if are_all else None for unit in units]  # before these hooks, which others could draw in
        for number, (unit, dropouts) in enumerate(zip(units, layers)):
            unit.register_forward_pre_hook(functools.partial(seed_unit, number=number, dropouts=dropouts))
        if units:
            every = None if None in layers else [layer for dropouts in layers for layer in dropouts or ()]
            units[-1].register_forward_hook(functools.partial(seed_unit, number=len(units), dropouts=every))

    def reseed(self, *unit: int) -> None:
        calls = ("call", self._num_calls) if self._num_calls > 1 else ()
        seed_generators(key(self.seed, *self.at, *calls, *unit), devices=self.devices)

    def __call__(self, model: Callable[..., Any], micro_batch: MicroBatch, *, measure: bool) -> tuple[Tensor, Sums]:
        """Return the sum of the losses, for the backward pass, and all sums, with `measure` also those of the metrics."""
        self.current = micro_batch
        try:
            compute = functools.partial(call, model, micro_batch.inputs)
            outputs = compute() if self.autocast is None else self.for_loss(compute)
        except Exception as error:
            name_samples(error, micro_batch)
            raise
        return self.measured(outputs, micro_batch, measure=measure)

    def outputs(self, model: Callable[..., Any], micro_batch: MicroBatch) -> Tree:
        """Return the model's outputs."""
        self.current = micro_batch
        try:
            return self.in_precision(lambda: call(model, micro_batch.inputs))
        except Exception as error:
            name_samples(error, micro_batch)
            raise

    def measured(self, outputs: Tree, micro_batch: MicroBatch, *, measure: bool) -> tuple[Tensor, Sums]:
        """Return the loss and the sums, as a call of this object does, for outputs that already exist."""
        try:
            loss: Any = self.task.loss(outputs, micro_batch.targets)
            if self._weight_of_loss is not None:
                if isinstance(loss, tuple):
                    raise TypeError(
                        "loss() returns a pair, but the task has loss_weight() (return the sum; or loss_weight = None)"
                    )
                known = micro_batch.weight
                loss = loss, self._weight_of_loss(micro_batch.targets) if known is None else known
        except Exception as error:
            name_samples(error, micro_batch, narrowed=lambda part: self.task.loss(part(outputs), part(micro_batch.targets)))
            raise
        values: dict[str, Value] = {"loss": loss}
        if measure and (metrics := getattr(self.task, "metrics", None)) is not None:
            measured = metrics(map_tensors(Tensor.detach, outputs), micro_batch.targets)
            if "loss" in measured:
                raise Unfit("task: its metrics() returns a value with the name of the loss (use a new name)")
            values |= measured
        sums = as_sums(values)
        if len(sums) < 2 * len(values):  # a sum has no weight
            require_rows(sums, micro_batch)
        return loss_in(values), sums

    def weighed(
        self, step: Step, *, scale: float, num_samples: int, is_counted: bool, among_ranks: bool
    ) -> tuple[Step, Factor]:
        """Return the step with the weight of each micro-batch's loss, and the factor of these losses.

        The factor is `scale`, divided by the weight of the global batch, or by `num_samples` if the task does not tell the
        weight before the forward. With `among_ranks`, the weights of all ranks that count are added. Ranks that know all
        targets need no message for a count, which no cut rounds; otherwise this is collective, while the first forward runs.
        """
        if self._weight is None:
            return step, lambda: scale / num_samples
        if step.micro_batches[0].targets is None:
            raise Unfit(f"dataset: a batch has no targets, which this task needs ({TARGETS_REMEDY})")
        step = step._replace(micro_batches=[m._replace(weight=_exact(self._weight(m.targets))) for m in step.micro_batches])
        if among_ranks and step.targets is not None and not _is_fraction(weight := self._weight(step.targets)):
            return step, _factor(scale, _exact(weight))
        counted: list[Any] = [m.weight for m in step.micro_batches if is_counted and not m.is_padding]
        total = sum(counted[1:], counted[0]) if counted else 0.0
        if not among_ranks:
            return step, _factor(scale, total)
        of_ranks = torch.zeros((), dtype=torch.float64, device=self.device) + total
        return step, _factor(scale, of_ranks, dist.all_reduce(of_ranks, async_op=True))

    def settle(self, module: nn.Module, sums: Sums, *, num_samples: int, among_ranks: bool) -> None:
        """End a step: divide the gradients by the weight of the loss, if only its result tells the weight. Collective."""
        self.at = ()
        if self._weight is None:
            weigh_gradients(module, sums, num_samples=num_samples, among_ranks=among_ranks)

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


@dataclass(eq=False)
class WholeModel:
    """Passes (framework/engine/engine.py) in which each micro-batch runs alone through the whole model."""

    forward: Forward
    model: Callable[..., Any]  # the wrapper, or the model
    buffers: Sequence[Buffers]

    def of(self, step: Step) -> Sequence[Sequence[MicroBatch]]:
        return [[micro_batch] for micro_batch in step.micro_batches]

    def train(self, micro_batches: Sequence[MicroBatch], step: Step, *, index: int, factor: Factor, measure: bool) -> Sums:
        (micro_batch,) = micro_batches
        self.forward.seed_draws(step=index, micro_batch=micro_batch.number, turn=step.turn)
        loss, sums = self.forward(self.model, micro_batch, measure=measure)
        scaled(loss, factor, micro_batch).backward()
        for buffers in self.buffers:
            buffers.end_forward(None if micro_batch.is_padding else micro_batch.number)
        return counted(sums, micro_batch)

    def evaluate(self, micro_batches: Sequence[MicroBatch], step: Step, *, observe: bool) -> Sums:
        (micro_batch,) = micro_batches
        self.forward.seed_draws(step=None, micro_batch=micro_batch.number)
        outputs = self.forward.outputs(self.model, micro_batch)
        if observe and not micro_batch.is_padding:
            return self.forward.evaluated(outputs, micro_batch)
        return counted(self.forward.measured(outputs, micro_batch, measure=True)[1], micro_batch)

    def outputs(self, inputs: Tree) -> Tree:
        self.forward.seed_draws(step=None, micro_batch=0)
        return self.forward.in_precision(lambda: call(self.model, inputs))


def _is_fraction(weight: Any) -> bool:
    return weight.is_floating_point() if isinstance(weight, Tensor) else isinstance(weight, float)


def _exact(weight: Any) -> Any:
    return weight.to(WIDEST[weight.device.type]) if isinstance(weight, Tensor) else weight


def _factor(scale: float, weight: Any, work: "dist.Work | None" = None) -> Factor:
    """Return the factor of the losses for the weight of a global batch, which is known when `work` is done."""

    def factor() -> Tensor | float:
        if work is not None:
            work.wait()
        if getattr(weight, "device", _CPU).type != "cpu":  # the host does not wait for a GPU
            return torch.where(weight > 0, scale / weight, 0.0)
        return scale / number if (number := float(weight)) > 0 else 0.0

    return factor


def scaled(loss: Tensor, factor: Factor, micro_batch: MicroBatch) -> Tensor:
    """Return a micro-batch's part of the step's loss: for padding it is zero, so that its gradients are."""
    value = 0.0 if micro_batch.is_padding else factor()
    return loss * (value.to(loss) if isinstance(value, Tensor) else value)


def counted(sums: Sums, micro_batch: MicroBatch) -> Sums:
    """Return the sums of a micro-batch; for padding, zeros."""
    return {name: torch.zeros_like(value) for name, value in sums.items()} if micro_batch.is_padding else sums


def weigh_gradients(module: nn.Module, sums: Sums, *, num_samples: int, among_ranks: bool) -> None:
    """Divide the gradients by the weight of the loss, if it has a weight, instead of the number of samples.

    For a loss with a weight that only `loss` knows. With `among_ranks`, the weight of all ranks (collective); else this rank's
    own weight. A weight of zero leaves no gradient.
    """
    if (weight := sums.get(weight_of("loss"))) is None:
        return
    if among_ranks:
        weight = weight.clone()
        dist.all_reduce(weight)
    factor = torch.where(weight > 0, num_samples / weight, 0.0)
    if factor.device.type != "cpu" or factor != 1.0:  # do not compare a number on a GPU: the comparison would wait for the GPU
        for gradients in by_mesh(p.grad for p in nn.Module.parameters(module) if p.grad is not None):
            # CUDA would multiply the gradients one by one by a factor of another dtype
            for kind in {(gradient.device, gradient.dtype) for gradient in gradients}:
                multiply_all([g for g in gradients if (g.device, g.dtype) == kind], factor.to(*kind))


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
