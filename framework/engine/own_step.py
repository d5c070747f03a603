"""A task's own step: it may call the model several times, read other samples' tensors and use averaged weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from framework.engine.forward import Factor, WholeModel, counted, scaled
from framework.engine.of_samples import name_samples, require_rows
from framework.engine.seam import MicroBatch, Step
from framework.engine.sums import Sums, Value, add, as_sums, loss_in
from framework.modules.tensors import Tree, map_tensors, tensors_in
from framework.randomness import key

Call = Callable[..., Any]


class Batch(NamedTuple):
    """One micro-batch, as a task's step gets it."""

    inputs: Tree
    targets: Tree


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """The values and functions that a task's step can use in addition to the model and its batch."""

    step: int  # optimizer steps taken before this step; 0 in an evaluation
    epoch: int
    batch: int  # the number of the global batch in the epoch, or in the evaluation
    split: str  # train, val or test
    is_training: bool
    is_padding: bool  # the micro-batch repeats another one, with weight zero: a step that counts must not count it
    turn: str  # the name of the turn (optimizer.turns) whose parameters this step moves; empty without turns and in evaluations
    num_samples: int  # in the global batch
    start: int  # the index of the batch's first sample in the global batch
    size: int  # the number of the batch's samples
    generator: torch.Generator  # its draws depend only on the seed, the step and the micro-batch
    generator_of_step: torch.Generator  # its draws are the same in all turns of a step
    averaged: Call  # calls the model with the averaged weights (trainer.ema_decay), without gradients; its buffers do not move


class Target:
    """The model in a task's step, or a part or method of it: what the step calls.

    `run` takes the target and the arguments.
    """

    def __init__(self, run: Call, target: Any) -> None:
        self._run, self._target = run, target

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._run(self._target, *inputs, **named)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if isinstance(found, Tensor) or hasattr(nn.Module, name):
            what = "a step calls the model, its methods and its modules, but does not read its weights"
            raise AttributeError(f"call.{name}: {what}, which a strategy may have cut (a method of the model can)")
        return Target(self._run, found) if callable(found) else found

    def __getitem__(self, key: Any) -> "Target":
        return Target(self._run, self._target[key])


class Result(NamedTuple):
    """The result of a task's step for a micro-batch: the sum of its losses, and all sums."""

    micro_batch: MicroBatch
    loss: Tensor
    sums: Sums


@dataclass(eq=False)
class OwnSteps(WholeModel):
    """Passes in which a task's own step runs: for each micro-batch alone, or for all together if its loss reads all rows.

    `exchange` joins this rank's rows with the rows of all ranks that have other parts of the global batch.
    """

    module: nn.Module
    _: KW_ONLY
    exchange: Callable[[Tensor], Tensor]
    averaged: Callable[[Callable[[], Any]], Any]

    def __post_init__(self) -> None:
        self._reads_all = hasattr(self.forward.task, "loss_of_rows")

    def of(self, step: Step) -> Sequence[Sequence[MicroBatch]]:
        return [step.micro_batches] if self._reads_all else super().of(step)

    def train(self, micro_batches: Sequence[MicroBatch], step: Step, *, index: int, factor: Factor, measure: bool) -> Sums:
        results = self._results(micro_batches, step, index)
        torch.autograd.backward([scaled(result.loss, factor, result.micro_batch) for result in results])
        return self._ended(results)

    def evaluate(self, micro_batches: Sequence[MicroBatch], step: Step, *, observe: bool) -> Sums:
        return self._ended(self._results(micro_batches, step, None))

    def _ended(self, results: Sequence[Result]) -> Sums:
        sums = Sums()
        for result in results:
            if not self._reads_all:
                self._end(result.micro_batch)
            add(sums, counted(result.sums, result.micro_batch))
        return sums

    def _results(self, micro_batches: Sequence[MicroBatch], step: Step, index: int | None) -> list[Result]:
        """Run the step. Index None: an evaluation."""
        if self._reads_all:
            return self._in_two_phases(micro_batches, step, index)
        (micro_batch,) = micro_batches
        batch, context = self._given(micro_batch, step, index)
        return [self._result(micro_batch, self._step(micro_batch, batch, context))]

    def _in_two_phases(self, micro_batches: Sequence[MicroBatch], step: Step, index: int | None) -> list[Result]:
        """Run `step` for each micro-batch, join the rows that it returns, and then `loss_of_rows` for each. Collective."""
        (buffers,) = self.buffers
        tensors, values, halves = buffers.tensors, buffers.values(), list[tuple[Any, ...]]()
        for micro_batch in micro_batches:
            batch, context = self._given(micro_batch, step, index)
            halves.append((micro_batch, batch, context, self._step(micro_batch, batch, context), buffers.values()))
            if len(micro_batches) > 1:
                buffers.set(values, onto=tensors)
        everyone, results = self._joined([(micro_batch, own) for micro_batch, _, _, own, _ in halves]), list[Result]()
        for micro_batch, batch, context, own, after in halves:
            buffers.set(after)
            self._begin(micro_batch, step, index, "rows")
            try:
                value = self.forward.task.loss_of_rows(own, everyone, batch, context)  # type: ignore[attr-defined]
            except Exception as error:
                name_samples(error, micro_batch)
                raise
            results.append(self._result(micro_batch, value))
            self._end(micro_batch)
        return results

    def _joined(self, halves: Sequence[tuple[MicroBatch, Tree]]) -> Tree:
        """Return the rows of all samples of the global batch, in its order. Padding has none. Collective."""
        rows = [[tensor[:0] if micro_batch.is_padding else tensor for tensor in _rows_in(own)] for micro_batch, own in halves]
        joined = iter([self.exchange(own[0] if len(own) == 1 else torch.cat(own)) for own in zip(*rows, strict=True)])
        return map_tensors(lambda _: next(joined), halves[0][1])

    def _end(self, micro_batch: MicroBatch) -> None:
        self.buffers[0].end_forward(None if micro_batch.is_padding else micro_batch.number)

    def _begin(self, micro_batch: MicroBatch, step: Step, index: int | None, *phase: str) -> None:
        self.forward.current = micro_batch
        self.forward.seed_draws(*phase, step=index, micro_batch=micro_batch.number, turn=step.turn)

    def _given(self, micro_batch: MicroBatch, step: Step, index: int | None) -> tuple[Batch, Context]:
        """Begin a micro-batch; return what its step gets besides the model."""
        forward = self.forward
        self._begin(micro_batch, step, index)
        at = (-1 if index is None else index, micro_batch.number)
        of_turn, of_step = (torch.Generator(forward.device) for _ in range(2))
        of_turn.manual_seed(key(forward.seed, "step", *at, *(("turn", step.turn) if step.turn else ())))
        of_step.manual_seed(key(forward.seed, "all turns", *at))
        context = Context(
            step=index or 0,
            epoch=step.epoch,
            batch=step.batch,
            split=micro_batch.split,
            is_padding=micro_batch.is_padding,
            is_training=index is not None,
            turn=step.turn,
            num_samples=step.num_samples,
            start=micro_batch.start,
            size=micro_batch.num_samples,
            generator=of_turn,
            generator_of_step=of_step,
            averaged=Target(lambda *given, **named: self.averaged(lambda: self._call(*given, **named)), self.module),
        )
        return Batch(micro_batch.inputs, micro_batch.targets), context

    def _step(self, micro_batch: MicroBatch, batch: Batch, context: Context) -> Any:
        try:
            return self.forward.task.step(Target(self._call, self.module), batch, context)  # type: ignore[attr-defined]
        except Exception as error:
            name_samples(error, micro_batch)
            raise

    @staticmethod
    def _result(micro_batch: MicroBatch, value: Any) -> Result:
        values: Mapping[str, Value] = value if isinstance(value, Mapping) else {"loss": value}
        if "loss" not in values:
            raise TypeError(f"step() returns {', '.join(values) or 'nothing'}, and no loss")
        sums = as_sums(values)
        require_rows(sums, micro_batch, among=(micro_batch.targets, micro_batch.inputs))  # a step may pair several rows
        return Result(micro_batch, loss_in(values), sums)

    def _call(self, target: Call, /, *inputs: Any, **named: Any) -> Any:
        """Call the model, or a part or method of it in the place of the model's forward: so the strategy's hooks run."""
        self.forward.begin_call()
        if target is self.module:
            return self.forward.in_precision(lambda: self.model(*inputs, **named))
        attributes = vars(self.module)
        before = attributes.pop("forward", None)

        def restore() -> None:
            attributes.pop("forward", None)
            if before is not None:
                attributes["forward"] = before

        def run(*inputs: Any, **named: Any) -> Any:
            restore()  # the target may call the model's forward itself
            return target(*inputs, **named)

        attributes["forward"] = run
        try:
            return self.forward.in_precision(lambda: self.model(*inputs, **named))
        finally:
            restore()


def _rows_in(own: Tree) -> list[Tensor]:
    """Return the tensors whose rows are joined. TypeError for a number, or if there is none."""
    found = tensors_in(own)
    if not found or any(tensor.ndim == 0 for tensor in found):
        what = "nothing with rows" if not found else "a number, which has no rows: unsqueeze(0) makes it a row"
        raise TypeError(f"step() returns {what}, but loss_of_rows() needs rows, one for each sample")
    return found
