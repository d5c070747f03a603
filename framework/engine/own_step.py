"""A task's own step: it may call the model several times, read other samples' tensors and use averaged weights."""

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from framework.engine.buffers import Buffers
from framework.engine.forward import Forward
from framework.engine.of_samples import naming, require_rows
from framework.engine.seam import MicroBatch, Step
from framework.engine.sums import Sums, Value, as_sums, loss_in
from framework.modules.tensors import Tree
from framework.randomness import generator_states, key, set_generator_states
from framework.runtime.exits import Unfit
from framework.runtime.torch_modes import set_thread_modes, thread_modes

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
    is_training: bool
    turn: str  # the name of the turn (optimizer.turns) whose parameters this step moves; empty without turns and in evaluations
    num_samples: int  # in the global batch
    start: int  # the index of the batch's first sample in the global batch
    generator: torch.Generator  # its draws depend only on the seed, the step and the micro-batch
    generator_of_step: torch.Generator  # its draws are the same in all turns of a step
    averaged: Call  # calls the model with the averaged weights (trainer.ema_decay), without gradients; its buffers do not move

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all samples of the global batch, in its order: (B, ...) -> (N, ...). Differentiable. Collective.

        The micro-batches of a step wait here for each other, so their activations are in memory at the same time. Every
        micro-batch must call this method equally often.
        """
        if tensor.ndim == 0:
            raise TypeError("gather() joins the rows of samples, and a number has no rows: unsqueeze(0) makes it a row")
        if torch.is_inference_mode_enabled():
            raise TypeError("gather() cannot be called in torch.inference_mode() (torch.no_grad())")
        loop = getcurrent().parent
        if loop is None:
            raise RuntimeError("gather() can only be called in a task's step")
        gathered: Tensor = loop.switch(tensor)
        return gathered


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
class _Waiting:
    """A micro-batch that waits in gather()."""

    run: greenlet
    micro_batch: MicroBatch
    tensor: Tensor
    surroundings: "_Surroundings"


@dataclass(frozen=True)
class _Surroundings:
    """The state around a micro-batch's step, which is saved while another micro-batch runs."""

    modes: tuple[Any, ...]
    generators: Any
    buffers: Sequence[Tensor]
    draws: Any


@dataclass(eq=False)
class OwnSteps:
    """A runner of a task's step on the micro-batches of a rank.

    `exchange` joins this rank's rows with the rows of all ranks that have other parts of the global batch.
    """

    forward: Forward
    model: Call  # the wrapper of `module`, or `module`
    module: nn.Module
    buffers: Buffers
    exchange: Callable[[Tensor], Tensor]
    averaged: Callable[[Callable[[], Any]], Any]

    def run(self, step: Step, *, index: int | None) -> Iterator[list[Result]]:
        """Yield the results of the step: for each micro-batch alone, or for all together if they wait for each other.

        Index None: an evaluation.
        """
        is_alone, waiting = len(step.micro_batches) == 1, list[_Waiting]()
        tensors, values = ([], []) if is_alone else (self.buffers.tensors, self.buffers.values())
        for micro_batch in step.micro_batches:
            run = greenlet(self._one)
            run.gr_context = contextvars.copy_context()
            modes = thread_modes(self.forward.devices)
            given = run.switch(micro_batch, step, index)
            if run.dead:
                _require(not waiting)
                yield [given]
                self._end(micro_batch)  # after its backward pass
                continue
            waiting.append(_Waiting(run, micro_batch, given, self._surroundings()))
            set_thread_modes(modes)
            if not is_alone:
                self.buffers.set(values, onto=tensors)
        while waiting:
            own = [item.tensor[:0] if item.micro_batch.is_padding else item.tensor for item in waiting]
            gathered = self.exchange(own[0] if len(own) == 1 else torch.cat(own))
            finished = [self._go_on(item, gathered) for item in waiting]
            if done := [result for result in finished if result is not None]:
                _require(len(done) == len(waiting))
                yield done
                return

    def _go_on(self, item: _Waiting, gathered: Tensor) -> Result | None:
        """Continue a micro-batch; return its result, or None if it waits again."""
        then, modes = item.surroundings, thread_modes(self.forward.devices)
        set_thread_modes(then.modes)
        set_generator_states(then.generators, devices=self.forward.devices)
        self.buffers.set(then.buffers)
        self.forward.draws = then.draws
        given = item.run.switch(gathered)
        if item.run.dead:
            self._end(item.micro_batch)
            result: Result = given
            return result
        item.tensor, item.surroundings = given, self._surroundings()
        set_thread_modes(modes)
        return None

    def _end(self, micro_batch: MicroBatch) -> None:
        self.buffers.end_forward(None if micro_batch.is_padding else micro_batch.number)

    def _surroundings(self) -> _Surroundings:
        devices = self.forward.devices
        return _Surroundings(
            thread_modes(devices), generator_states(devices=devices), self.buffers.values(), self.forward.draws
        )

    def _one(self, micro_batch: MicroBatch, step: Step, index: int | None) -> Result:
        forward, number = self.forward, micro_batch.number
        forward.is_padding = micro_batch.is_padding
        forward.seed_draws(step=index, micro_batch=number, turn=step.turn)
        at = (-1 if index is None else index, number)
        of_turn, of_step = (torch.Generator(forward.device) for _ in range(2))
        of_turn.manual_seed(key(forward.seed, "step", *at, *(("turn", step.turn) if step.turn else ())))
        of_step.manual_seed(key(forward.seed, "all turns", *at))
        context = Context(
            step=index or 0,
            epoch=step.epoch,
            is_training=index is not None,
            turn=step.turn,
            num_samples=step.num_samples,
            start=micro_batch.start,
            generator=of_turn,
            generator_of_step=of_step,
            averaged=Target(lambda *given, **named: self.averaged(lambda: self._call(*given, **named)), self.module),
        )
        batch = Batch(micro_batch.inputs, micro_batch.targets)
        with naming(micro_batch):
            value = forward.task.step(Target(self._call, self.module), batch, context)  # type: ignore[attr-defined]
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


def _require(are_alike: bool) -> None:
    if not are_alike:
        raise Unfit(
            "task: its step() calls gather() for some micro-batches of a step more often than for others (equally often)"
        )
