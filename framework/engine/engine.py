"""The Engine: a model under a strategy, which turns the micro-batches of a step into gradients, on any layout of ranks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from framework.engine.buffers import Buffers
from framework.engine.forward import Factor, Forward, WholeModel
from framework.engine.own_step import OwnSteps
from framework.engine.rows import gather_rows
from framework.engine.seam import MicroBatch, Step
from framework.engine.sums import Sums, add
from framework.modules.tensors import Tree, by_mesh, map_tensors, whole
from framework.optim.optimizers import BuildOptimizer, MakeOptimizer, Trainable
from framework.optim.update import Average
from framework.runtime.exits import Unfit
from framework.runtime.torch_internals import same_versions, without_modes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MicroBatches = Sequence[MicroBatch]
RunPass = Callable[[MicroBatches, bool], Sums]  # runs a pass; the flag says whether it is the step's last


class Passes(Protocol):
    """The way of a step's micro-batches through a model: in which passes they run, and how a pass runs."""

    @property
    def buffers(self) -> Sequence[Buffers]:
        """The buffers that a step changes."""

    def of(self, step: Step) -> Sequence[MicroBatches]:
        """Return the micro-batches of each pass."""

    def train(self, micro_batches: MicroBatches, step: Step, *, index: int, factor: Factor, measure: bool) -> Sums:
        """Run a pass forward and backward. Add to `.grad` the gradient of the sum of the losses, times `factor`."""

    def evaluate(self, micro_batches: MicroBatches, step: Step, *, observe: bool) -> Sums:
        """Run a pass forward. With `observe`, show the outputs to the observers."""

    def outputs(self, inputs: Tree) -> Tree:
        """Return the model's outputs for inputs that are the same on every rank. Unfit if no rank has all of them."""


def accumulate(step: Step, passes: Sequence[MicroBatches], run: RunPass) -> Sums:
    """Run the passes of a step one after the other; return the sums over all. Their gradients add up in `.grad`."""
    sums: Sums = {}
    for micro_batches in passes:
        add(sums, run(micro_batches, micro_batches is passes[-1]))
    return sums


@dataclass(kw_only=True, eq=False)
class Engine:
    """A model under a strategy. All methods are collective: every rank calls them, in the same order.

    The loss is divided by the number (or weight) of the samples in the GLOBAL batch, so the gradients of the ranks are summed.
    """

    module: nn.Module  # this rank's parameters (plain tensors, or DTensor shards) under the model's own names
    forward: Forward
    model: Callable[..., Any] | None = None  # the wrapper that is called in the place of the module
    passes: InitVar[Passes | None] = None  # None: each micro-batch runs through the whole model
    mesh: "DeviceMesh | None" = None
    dp_rank: int = 0
    dp_size: int = 1  # the number of parts of a global batch, of which this rank has the one with the number dp_rank
    data_group: dist.ProcessGroup | None = None  # the ranks with the other parts of the global batch; None: all ranks
    is_counted: bool = True  # of ranks that compute the same from the same samples, one is counted
    averaged_over: int = 1  # if the strategy averages gradients instead: over so many ranks
    slice: Callable[[MicroBatch], MicroBatch] | None = None  # returns this rank's tokens of samples that several ranks have
    accumulate: Callable[[Step, Sequence[MicroBatches], RunPass], Sums] = accumulate
    no_gather: str = ""  # why a step of the task's own cannot read the other samples
    set_sync: Callable[[bool], None] = lambda is_last: None  # called before each pass: the last completes the gradients
    finish: Callable[[], None] = lambda: None  # called after the last pass
    broadcast: Callable[[Sequence[Tensor]], None] | None = None  # sends rank 0's tensors to the other ranks
    meet_in_steps: bool = True  # False: ranks get rank 0's buffers only in `sync_buffers`, and see no others' samples
    alone: Callable[[int], bool] = lambda index: False  # in these steps each rank trains with its own samples alone
    make_optimizer: MakeOptimizer | None = None  # builds the optimizer of the parameters that this rank updates
    norm_over: dist.ProcessGroup | None = None  # ranks with other parameters, which count for the norm of the gradients
    uncounted: Collection[int] = ()  # the ids of parameters that another of these ranks counts
    warm_up: Callable[[], None] = lambda: None  # does once, before the first step, the work that must not happen in it
    forget: Callable[[], None] = lambda: None  # drops all that was computed from weights which are about to be exchanged
    explain: Callable[[Exception], None] | None = None  # raises a better error for an error of a step
    trail: Callable[[], int] = lambda: 0  # a number below 2^52 for what this rank has run, if all ranks must run the same
    parts: Mapping[str, Any] = field(default_factory=dict)  # the strategy's own parts of the loop, called after the user's

    def __post_init__(self, passes: Passes | None) -> None:
        self._passes: Passes
        self._measuring: Passes
        self.task, self.observers = self.forward.module, self.forward.observers
        self.average: Average | None = None  # the weights that a task's own step may call the model with
        self._is_alone = False  # whether the current step is
        self._parameters = [p for p in nn.Module.parameters(self.module) if p.requires_grad]
        if passes is not None:
            self._passes = self._measuring = passes
            return
        model, held = self.model or self.module, [self.module] if self.task is None else [self.module, self.task]
        buffers = [Buffers(*held, broadcast=self.broadcast if self.meet_in_steps else None)]
        plain = WholeModel(self.forward, model, [one for one in buffers if one.tensors])
        own = OwnSteps(self.forward, model, buffers, self.module, exchange=self._exchange, averaged=self._averaged)
        self._passes = own if self.forward.trains_by_step else plain
        self._measuring = own if self.forward.measures_by_step else plain

    def train(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        """Put into `.grad` the gradient of the global batch's mean loss, times `loss_scale`.

        The mean is the sum divided by the number of samples, or by the weight if the loss has a weight. `index` is the number
        of the step. Return this rank's sums over its samples: the loss, and with `measure` the task's metrics.
        """
        passes, step, self._is_alone = self._passes, self._sliced(step), self.alone(index)
        num_samples, scale = step.num_samples, loss_scale * self.averaged_over
        if self._is_alone:
            num_samples, scale = max(1, step.num_own_samples), loss_scale
        among_ranks = dist.is_initialized() and not self._is_alone
        step, factor = self.forward.weighed(
            step, scale=scale, num_samples=num_samples, is_counted=self.is_counted, among_ranks=among_ranks
        )

        def run(micro_batches: MicroBatches, is_last: bool) -> Sums:
            self.set_sync(is_last)
            return passes.train(micro_batches, step, index=index, factor=factor, measure=measure)

        for buffers in passes.buffers:
            buffers.begin_step(is_alone=[micro_batch.number for micro_batch in step.micro_batches] == [0])
        try:
            sums = self._counted(self.accumulate(step, passes.of(step), run))
        except RuntimeError as error:
            if self.explain is not None:
                self.explain(error)
            raise
        if not self._is_alone:
            self.finish()
        for buffers in passes.buffers:
            buffers.end_step()
        self.forward.settle(self.module, sums, num_samples=num_samples, among_ranks=among_ranks)
        return sums

    def evaluate(self, step: Step) -> Sums:
        """Evaluate this rank's part of a batch, without gradients: return the sums over this part."""
        passes, step = self._measuring, self._sliced(step)

        def run(micro_batches: MicroBatches, is_last: bool) -> Sums:
            return passes.evaluate(micro_batches, step, observe=self.is_counted)

        with torch.no_grad():
            sums = self._counted(self.accumulate(step, passes.of(step), run))
        self.forward.at = ()
        return sums

    def outputs(self, inputs: Tree) -> Tree:
        """Return the model's outputs for inputs that are the same on every rank, without gradients.

        Unfit if no rank has the outputs of the whole model.
        """
        if self.slice is not None:
            raise no_whole_outputs()
        with torch.no_grad():
            found = self._passes.outputs(inputs)
        self.forward.at = ()
        return found

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Scale the gradients so that their global L2 norm is at most `max_norm`; return the norm before scaling, shape ()."""
        kinds = by_mesh([p for p in self._parameters if p.grad is not None])
        counted = [[p.grad for p in kind if p.grad is not None and id(p) not in self.uncounted] for kind in kinds]
        norms = [whole(get_total_norm(gradients)) for gradients in counted]
        if not norms:  # a stage may have only frozen weights
            norms = [torch.zeros((), dtype=next(nn.Module.parameters(self.module)).dtype)]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        if self.norm_over is not None:
            norm = self._root_of_sum(norm, group=self.norm_over)
        if max_norm is not None:
            for kind in kinds:
                clip_grads_with_norm_(kind, max_norm, norm)
        return self._root_of_sum(norm / self.dp_size**0.5, group=None) if self._is_alone else norm

    def _root_of_sum(self, norm: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
        square = norm.to(self.forward.device, torch.float64).square()
        dist.all_reduce(square, group=group)
        return square.sqrt().to(norm.dtype)

    def optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        """Build the optimizer of the parameters that this rank updates. `trained` are the parameters in `module`."""
        return build(trained) if self.make_optimizer is None else self.make_optimizer(build, trained)

    def sync_buffers(self) -> None:
        """Give every rank the buffers (running statistics) that followed micro-batch 0."""
        tensors = [tensor for buffers in self._passes.buffers for tensor in buffers.tensors]
        if self.broadcast is not None and tensors:
            self.broadcast(tensors)
        for buffers in self._passes.buffers:
            buffers.synchronised()

    def _sliced(self, step: Step) -> Step:
        return step if self.slice is None else step._replace(micro_batches=[self.slice(m) for m in step.micro_batches])

    def _counted(self, sums: Sums) -> Sums:
        return sums if self.is_counted else {name: torch.zeros_like(value) for name, value in sums.items()}

    # --- what a task's own step uses

    def _exchange(self, own: Tensor) -> Tensor:
        if self.no_gather:
            raise Unfit(f"{self.no_gather}, but the task's loss_of_rows() reads the rows of all samples (samples)")
        return gather_rows(own, group=self.data_group) if self.dp_size > 1 and self.meet_in_steps else own

    def _averaged(self, compute: Callable[[], Tree]) -> Tree:
        """Return the result of `compute` with the averaged weights, without gradients."""
        if self.average is None:
            raise Unfit("trainer.ema_decay: null, but the task's step needs the averaged weights (such as 0.99)")
        before = [(buffers, buffers.tensors, buffers.values()) for buffers in self._passes.buffers]
        self.forget()
        with torch.no_grad(), same_versions(self._parameters):  # a later backward pass needs the same versions
            with without_modes():
                self.average.swap()
            try:
                outputs = compute()
            finally:
                self.forget()
                with without_modes():
                    self.average.swap()
        for buffers, tensors, values in before:
            buffers.set(values, onto=tensors)
        return map_tensors(Tensor.detach, outputs)


def no_whole_outputs() -> Unfit:
    """Return the error of an engine whose ranks each have a part of the outputs."""
    return Unfit("parallel: no process has the outputs of the whole model, which a part of the run needs (ddp or fsdp)")
