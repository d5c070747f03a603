"""The engine of every strategy in which a rank runs the whole model on its own samples."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from framework.engine.buffers import Buffers
from framework.engine.forward import Forward
from framework.engine.own_step import OwnSteps
from framework.engine.rows import gather_rows
from framework.engine.seam import Engine, MicroBatch, Step, no_whole_outputs
from framework.engine.sums import Sums, add
from framework.modules.tensors import Tree, by_mesh, call, map_tensors, whole
from framework.optim.optimizers import BuildOptimizer, MakeOptimizer, Trainable
from framework.optim.update import Average
from framework.runtime.exits import Unfit
from framework.runtime.torch_internals import same_versions, without_modes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DataParallelEngine(Engine):
    """The Engine of every strategy in which a rank runs the whole model on its own samples.

    `model` is the wrapper to call; without it, `module` is called. `set_sync(True)` is called before the last micro-batch,
    because its backward pass completes the gradients of all ranks; `set_sync(False)` before the others. Gradients are averaged
    over `averaged_over` ranks (None: `dp_size`). The loss is divided by the GLOBAL number of samples, so it is first
    multiplied by `averaged_over`. Where gradients are summed, this is 1: each backward pass has the gradients that it has in
    one process. Of the ranks that work on the same samples (tensor parallelism), one has `is_counted`. `warm_up` is called
    before the first step, `finish` after each step's last backward pass. Ranks without `meet_in_steps` get rank 0's buffers
    only in `sync_buffers`, and see no samples of other ranks. `data_group` has the ranks with the other parts of the global
    batch (None: all ranks). `trail` returns `Engine.trail`. `forget` is called before the weights are exchanged
    for their average: it must drop everything computed from the weights. `slice` returns this rank's tokens of a micro-batch
    that several ranks have. `explain` raises a better error for an error of a step. `parts` are `Engine.parts`. In the steps,
    counted from 0, for which `alone` is true, each rank trains with its own samples alone: the loss is divided by their number
    or weight, `finish` is not called, and the norm of the gradients is the root mean square of the norms of all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        forward: Forward,
        model: Callable[..., Any] | None = None,
        mesh: "DeviceMesh | None" = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        averaged_over: int | None = None,
        is_counted: bool = True,
        set_sync: Callable[[bool], None] = lambda _: None,
        broadcast: Callable[[Sequence[Tensor]], None] | None = None,
        make_optimizer: MakeOptimizer | None = None,
        warm_up: Callable[[], None] = lambda: None,
        finish: Callable[[], None] = lambda: None,
        meet_in_steps: bool = True,
        trail: Callable[[], int] = lambda: 0,
        data_group: dist.ProcessGroup | None = None,
        forget: Callable[[], None] = lambda: None,
        slice: Callable[[MicroBatch], MicroBatch] | None = None,
        explain: Callable[[Exception], None] | None = None,
        alone: Callable[[int], bool] = lambda index: False,
        parts: Mapping[str, Any] | None = None,
    ) -> None:
        self.module, self.task, self.observers = module, forward.module, forward.observers
        self.mesh = mesh
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.averaged_over = dp_size if averaged_over is None else averaged_over
        self.is_counted = is_counted
        self._model = model or module
        self._forward = forward
        self._set_sync = set_sync
        self._broadcast = broadcast
        self._make_optimizer = make_optimizer
        self._warm_up, self._finish = warm_up, finish
        held = [module] if self.task is None else [module, self.task]
        self.buffers = Buffers(*held, broadcast=broadcast if meet_in_steps else None)
        self._parameters = [p for p in nn.Module.parameters(module) if p.requires_grad]
        self._data_group = data_group
        self._has_others = dp_size > 1 and meet_in_steps
        self._forget = forget
        self._trail = trail
        self._alone, self._is_alone = alone, False  # whether the current step is alone
        self.parts = parts or {}
        self._slice, self._explain = slice, explain
        self._average: Average | None = None
        self.no_gather = ""  # why a step of the task's own cannot read the other samples

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        self._is_alone, num_samples = self._alone(index), step.num_samples
        if self._is_alone:
            num_samples = max(1, step.num_own_samples)
        self.buffers.begin_step(is_alone=[m.number for m in step.micro_batches if not m.is_padding] == [0])
        factor = self._factor(step, loss_scale * (1 if self._is_alone else self.averaged_over), num_samples=num_samples)
        try:
            sums = self.run_micro_batches(step, index=index, factor=factor, measure=measure)
        except RuntimeError as error:
            if self._explain is not None:
                self._explain(error)
            raise
        if not self._is_alone:
            self._finish()
        self.buffers.end_step()
        self._forward.settle(self.module, sums, num_samples=num_samples, among_ranks=not self._is_alone)
        return sums

    def _factor(self, step: Step, scale: float, *, num_samples: int) -> Tensor | float:
        counted = [self._sliced(micro_batch) for micro_batch in step.micro_batches if self._counts(micro_batch)]
        return self._forward.factor(counted, scale=scale, num_samples=num_samples, among_ranks=not self._is_alone)

    def run_micro_batches(self, step: Step, *, index: int, factor: Tensor | float, measure: bool) -> Sums:
        """Do the work of `forward_backward`, within a step of `buffers` that the caller has started."""
        if self._forward.trains_by_step:
            return self._run_own_steps(step, index=index, factor=factor)
        sums: Sums = {}
        last = len(step.micro_batches) - 1
        for position, micro_batch in enumerate(step.micro_batches):
            self._set_sync(position == last)
            self._forward.seed_draws(step=index, micro_batch=micro_batch.number, turn=step.turn)
            loss, more = self._forward(self._model, self._sliced(micro_batch), measure=measure)
            (loss * self._of(micro_batch, factor, loss)).backward()
            self.buffers.end_forward(None if micro_batch.is_padding else micro_batch.number)
            add(sums, self._counted(more, micro_batch))
        return sums

    @staticmethod
    def _of(micro_batch: MicroBatch, factor: Tensor | float, loss: Tensor) -> Tensor | float:
        return 0.0 if micro_batch.is_padding else factor.to(loss) if isinstance(factor, Tensor) else factor

    def _run_own_steps(self, step: Step, *, index: int, factor: Tensor | float) -> Sums:
        sums, num_left = Sums(), len(step.micro_batches)
        for results in self._own_steps().run(step, index=index):
            num_left -= len(results)
            self._set_sync(num_left == 0)
            torch.autograd.backward([r.loss * self._of(r.micro_batch, factor, r.loss) for r in results])
            for result in results:
                add(sums, self._counted(result.sums, result.micro_batch))
        return sums

    def _own_steps(self) -> OwnSteps:
        called = self._model, self.module
        return OwnSteps(self._forward, *called, buffers=self.buffers, exchange=self._exchange, averaged=self._averaged)

    def _exchange(self, own: Tensor) -> Tensor:
        if self.no_gather:
            raise Unfit(f"{self.no_gather}, but the task's loss_of_rows() reads the rows of all samples (samples)")
        return gather_rows(own, group=self._data_group) if self._has_others else own

    def _averaged(self, compute: Callable[[], Tree]) -> Tree:
        """Return the result of `compute` with the averaged weights, without gradients."""
        if self._average is None:
            raise Unfit("trainer.ema_decay: null, but the task's step needs the averaged weights (such as 0.99)")
        buffers, start = self.buffers.tensors, self.buffers.values()
        self._forget()
        with torch.no_grad(), same_versions(self._parameters):  # a later backward pass needs the same versions
            with without_modes():
                self._average.swap()
            try:
                outputs = compute()
            finally:
                self._forget()
                with without_modes():
                    self._average.swap()
        self.buffers.set(start, onto=buffers)
        return map_tensors(Tensor.detach, outputs)

    @property
    def is_padding(self) -> bool:
        return self._forward.is_padding

    @property
    def trail(self) -> int:
        return self._trail()

    def _sliced(self, micro_batch: MicroBatch) -> MicroBatch:
        return micro_batch if self._slice is None else self._slice(micro_batch)

    def outputs(self, inputs: Tree) -> Tree:
        if self._slice is not None:
            raise no_whole_outputs()
        self._forward.seed_draws(step=None, micro_batch=0)
        with torch.no_grad():
            return self._forward.in_precision(lambda: call(self._model, inputs))

    def use_average(self, average: Average | None) -> None:
        self._average = average

    def _counted(self, sums: Sums, micro_batch: MicroBatch) -> Sums:
        return sums if self._counts(micro_batch) else {name: torch.zeros_like(value) for name, value in sums.items()}

    def _counts(self, micro_batch: MicroBatch) -> bool:
        return self.is_counted and not micro_batch.is_padding

    def forward(self, micro_batch: MicroBatch) -> Sums:
        self._forward.seed_draws(step=None, micro_batch=micro_batch.number)
        micro_batch = self._sliced(micro_batch)
        with torch.no_grad():
            outputs = self._forward.outputs(self._model, micro_batch)
            if self._counts(micro_batch):
                return self._forward.evaluated(outputs, micro_batch)
            return self._counted(self._forward.measured(outputs, micro_batch, measure=True)[1], micro_batch)

    def evaluate(self, step: Step) -> Sums:
        if not self._forward.measures_by_step:
            return super().evaluate(step)
        sums: Sums = {}
        with torch.no_grad():
            for results in self._own_steps().run(step, index=None):
                for result in results:
                    add(sums, self._counted(result.sums, result.micro_batch))
        return sums

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        kinds = by_mesh([p for p in self._parameters if p.grad is not None])
        norms = [whole(get_total_norm([p.grad for p in kind if p.grad is not None])) for kind in kinds]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        if max_norm is not None:
            for kind in kinds:
                clip_grads_with_norm_(kind, max_norm, norm)
        if self._is_alone:
            square = norm.square()
            dist.all_reduce(square)
            norm = (square / self.dp_size).sqrt()
        return norm

    def warm_up(self, step: Step) -> None:
        self._warm_up()

    def sync_buffers(self) -> None:
        if self._broadcast is not None and (tensors := self.buffers.tensors):
            self._broadcast(tensors)
        self.buffers.synchronised()

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        return build(trained) if self._make_optimizer is None else self._make_optimizer(build, trained)
