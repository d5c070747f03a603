"""The Engine of a model whose layers are on several processes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from framework.distributed.world import World
from framework.engine.data_parallel import add, persistent_buffers
from framework.engine.forward import Forward
from framework.engine.seam import Engine, MicroBatch, Step, Sums
from framework.modules.structure import chain_of
from framework.modules.tensors import by_mesh, local, map_tensors, whole
from framework.optim.optimizers import BuildOptimizer, Trainable, stand_in
from framework.parallel.pipelining.chain import Shapes, Stage, costs_of, keep_own, shared_weights, spans_of
from framework.parallel.pipelining.schedules import STAGES_PER_RANK, LossFunction, make_schedule, waiting_share
from framework.runtime.log import LOGGER
from framework.runtime.torch_internals import copy_all, is_view


class PipelineEngine(Engine):
    """The Engine of a model whose layers are on the processes of the mesh's `pipeline` axis.

    Along a `replicate` axis every pipeline has its own samples, and this engine sums their gradients. Along a `shard` axis
    too, but there the stages, wrapped by `shard_stage`, average their gradients themselves. Processes along a `tensor` axis
    work on the same samples.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mesh: DeviceMesh,
        world: World,
        forward: Forward,
        schedule: str,
        shard_stage: Callable[[Stage], None] | None = None,
    ) -> None:
        links = chain_of(model)
        assert links is not None  # `problems` has checked it
        axes = mesh.mesh_dim_names or ()
        self.module = model
        self.mesh: DeviceMesh | None = mesh
        self._group = mesh.get_group("pipeline")
        self._data = next((mesh.get_group(axis) for axis in ("replicate", "shard") if axis in axes), None)
        self.dp_rank = self._data.rank() if self._data else 0
        self.dp_size = self._data.size() if self._data else 1
        self._is_sharded = shard_stage is not None
        self._is_counted = "tensor" not in axes or mesh.get_local_rank("tensor") == 0
        self._rank, self._size = self._group.rank(), self._group.size()
        self._world = world
        self._forward = forward
        self._schedule = schedule
        self._dtype = next(model.parameters()).dtype
        self._shapes = Shapes(links)
        self._num_stages = self._size * STAGES_PER_RANK[schedule]
        costs = costs_of(model, links, example=forward.example)
        self._spans = spans_of(links, costs, num_stages=self._num_stages)
        self._stages = keep_own(model, links, self._spans, rank=self._rank, size=self._size)
        for number, stage in self._stages.items():
            stage.forward = partial(self._run_stage, stage, number)
            if shard_stage is not None:
                shard_stage(stage)
        self._schedules: dict[Any, Any] = {}
        self._loss_of: LossFunction  # of the current pass
        self._numbers: dict[int, list[int]] = {}  # of the micro-batches that each stage still has to run
        self._index = 0
        self._buffers = persistent_buffers(model)
        self._after_first: dict[int, Tensor] = {}  # the buffers that micro-batch 0 has changed, by position
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._shared = shared_weights(model, mesh=mesh)

    # --- one stage of one micro-batch

    def _run_stage(self, stage: Stage, number: int, /, *arguments: Any, **named: Any) -> Any:
        micro_batch = self._numbers[number].pop(0) if self._numbers.get(number) else None
        if micro_batch is not None:
            self._forward.seed_draws(step=self._index, micro_batch=micro_batch)
        first, *rest = stage.links
        dtype = self._forward.autocast
        with torch.autocast(self._forward.device.type, dtype=dtype, enabled=dtype is not None):
            value = first(*arguments, **named)
            for link in rest:
                value = link(value)
        if micro_batch == 0:
            own = {id(buffer) for buffer in stage.buffers()}
            self._after_first |= {i: buffer.clone() for i, buffer in enumerate(self._buffers) if id(buffer) in own}
        # the next stage expects one type, whatever autocast returns, and contiguous memory; not a view, which zero-bubble
        # cannot detach, and not the wrapper of an unfinished collective
        value = value.to(self._dtype).contiguous()
        return value.clone() if is_view(value) or type(value) is not Tensor else value

    # --- training

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        self._index = index
        before = [buffer.clone() for buffer in self._buffers]
        self._after_first = {}
        sums = self._zeros(step.micro_batches[0], with_metrics=measure)
        scale = loss_scale / step.num_samples * (self.dp_size if self._is_sharded else 1)
        for micro_batches in _passes(step):
            self._pass(micro_batches, scale=scale, sums=sums, measure=measure)
        copy_all(self._buffers, [self._after_first.get(i, buffer) for i, buffer in enumerate(before)])
        for parameter, group in self._shared:
            if parameter.requires_grad:
                dist.all_reduce(local(_gradient(parameter)), group=group)
        if self._data is not None and not self._is_sharded:
            sent = [dist.all_reduce(_gradient(p), group=self._data, async_op=True) for p in self._parameters]
            for work in sent:
                work.wait()
        return sums if self._is_counted else {name: torch.zeros_like(value) for name, value in sums.items()}

    def _pass(self, micro_batches: Sequence[MicroBatch], *, scale: float, sums: Sums, measure: bool) -> None:
        waiting = list(micro_batches)

        def loss_of(outputs: Any, targets: Tensor) -> Tensor:
            micro_batch = waiting.pop(0)  # the last stage gets them in order
            loss = self._forward.task.loss(outputs, targets)
            if micro_batch.is_padding:
                return loss * 0.0
            add(sums, {"loss": loss.detach()})
            if measure:
                add(sums, self._forward.task.metrics(map_tensors(Tensor.detach, outputs), targets))
            return loss * scale

        num_schedules = len(self._schedules)
        schedule = self._schedule_for(micro_batches)
        # the gradients so far: when a schedule runs for the first time, torch clears the gradients of shards
        held = [p.grad for p in self._parameters] if len(self._schedules) > num_schedules else []
        self._loss_of = loss_of
        self._numbers = {number: [micro_batch.number for micro_batch in micro_batches] for number in self._stages}
        inputs = [torch.cat([m.inputs for m in micro_batches])] if 0 in self._stages else []
        is_last = self._num_stages - 1 in self._stages
        targets = {"target": torch.cat([m.targets for m in micro_batches])} if is_last else {}
        if held:
            self.module.zero_grad()
        try:
            schedule.step(*inputs, **targets, return_outputs=False)
        except RuntimeError as error:
            raise (error.__cause__ or error) from None  # torch wraps a link's error in one that prints all arguments
        for parameter, gradient in zip(self._parameters, held):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _schedule_for(self, micro_batches: Sequence[MicroBatch]) -> Any:
        inputs = micro_batches[0].inputs
        key = (len(micro_batches), tuple(inputs.shape))
        if key not in self._schedules:
            outputs = [value.to(self._dtype).contiguous() for value in self._shapes.outputs(inputs)]
            stages = []
            for number, stage in self._stages.items():
                given = _like(inputs if number == 0 else outputs[self._spans[number - 1][-1]], requires_grad=number > 0)
                made = _like(outputs[self._spans[number][-1]], requires_grad=True)
                where = (number, self._num_stages, self._world.device)
                stages.append(PipelineStage(stage, *where, input_args=given, output_args=made, group=self._group))
            count = len(micro_batches)
            # a schedule keeps its loss function, but the loss changes with each pass
            schedule = make_schedule(self._schedule, stages, num_micro_batches=count, loss=lambda *given: self._loss_of(*given))
            if self._world.rank == 0 and not self._schedules:
                kind = type(schedule).__name__.removeprefix("Schedule")
                waiting = waiting_share(schedule, num_micro_batches=count, num_ranks=self._size)
                LOGGER.info("pipeline: %d stages on %d processes, %d micro-batch%s in a pass (%s), %.0f %% of the time waiting",
                            self._num_stages, self._size, count, "es" * (count != 1), kind, 100 * waiting)  # fmt: skip
            self._schedules[key] = schedule
        return self._schedules[key]

    def _zeros(self, micro_batch: MicroBatch, *, with_metrics: bool) -> Sums:
        """Return a zero for each measured sum: every rank must know its name, but only the last stage measures it."""
        names = ["loss"]
        if with_metrics:
            outputs = self._shapes.outputs(micro_batch.inputs)[-1]
            targets = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), micro_batch.targets)
            names += self._forward.task.metrics(outputs, targets)
        return {name: torch.zeros((), device=self._world.device) for name in names}

    # --- evaluation

    def forward(self, micro_batch: MicroBatch) -> Sums:
        """Run the stages one after the other, each on its process."""
        outputs = self._shapes.outputs(micro_batch.inputs)
        value: Any = micro_batch.inputs
        with torch.no_grad():
            for number in range(self._num_stages):
                owner, before = number % self._size, (number - 1) % self._size
                if number > 0 and owner != before:
                    if self._rank == before:
                        dist.send(value.contiguous(), dst=dist.get_global_rank(self._group, owner), group=self._group)
                    elif self._rank == owner:
                        shape = outputs[self._spans[number - 1][-1]].shape
                        value = torch.empty(shape, dtype=self._dtype, device=self._world.device)
                        dist.recv(value, src=dist.get_global_rank(self._group, before), group=self._group)
                if self._rank == owner:
                    value = self._stages[number](value)
            if self._num_stages - 1 not in self._stages or micro_batch.is_padding or not self._is_counted:
                return self._zeros(micro_batch, with_metrics=True)
            sums = {"loss": self._forward.task.loss(value, micro_batch.targets)}
            return sums | self._forward.task.metrics(value, micro_batch.targets)

    # --- the rest of an Engine

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        foreign = {id(parameter) for parameter, group in self._shared if group.rank() != 0}  # counted by another rank
        own = [p.grad for p in self._parameters if p.grad is not None and id(p) not in foreign]
        square = torch.zeros((), dtype=self._dtype, device=self._world.device)
        for kind in by_mesh(own):
            square += whole(get_total_norm(kind)).square()
        dist.all_reduce(square, group=self._group)
        norm = square.sqrt()
        if max_norm is not None:
            for parameters in by_mesh(self._parameters):
                clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def sync_buffers(self) -> None:
        if self._data is not None:
            for buffer in self._buffers:
                dist.broadcast(buffer, src=dist.get_global_rank(self._data, 0), group=self._data)

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        return build(trained or stand_in(self._world.device))  # a stage may have frozen weights only


def _passes(step: Step) -> list[Sequence[MicroBatch]]:
    """Cut a step into passes through the pipeline: a schedule is made for one shape.

    A short micro-batch is the last of its rank, and is run alone. Then every other rank runs its last micro-batch alone too:
    all ranks gather shards in each pass.
    """
    if step.is_even or len(step.micro_batches) == 1:
        return [step.micro_batches]
    *others, last = sorted(step.micro_batches, key=lambda micro_batch: (not micro_batch.is_padding, micro_batch.number))
    return [others, [last]]


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _like(tensor: Tensor, *, requires_grad: bool) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(requires_grad and tensor.is_floating_point())
