"""The passes of a step through a model with layers on several processes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from framework.distributed.buckets import broadcast_all
from framework.distributed.world import World
from framework.engine.buffers import Buffers
from framework.engine.engine import no_whole_outputs
from framework.engine.forward import Factor, Forward, counted, scaled
from framework.engine.seam import MicroBatch, Step
from framework.engine.sums import Sums, add
from framework.modules.tensors import Tree, map_tensors
from framework.modules.trace import example_of
from framework.parallel.pipelining.chain import Stage, shared_weights
from framework.parallel.pipelining.own_forward import chain_for
from framework.parallel.pipelining.schedules import make_schedule, owners, waiting_share
from framework.parallel.pipelining.sent import SendDtype, Sent
from framework.parallel.replica import sum_gradients
from framework.runtime.log import LOGGER
from framework.runtime.torch_internals import greet_others_only


class Pipeline:
    """Passes (framework/engine/engine.py) through a model with layers on the processes of the mesh's `pipeline` axis.

    Several pipelines can have other samples, or other tokens. Their processes with the same stages are `same_stages`; this
    sums their gradients over `summed_over`, if it is given. `cut_stage` cuts or shards a stage before it is filled; a sharded
    stage sums its gradients itself.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mesh: DeviceMesh,
        world: World,
        forward: Forward,
        schedule: str,
        send_dtype: SendDtype = None,
        cut_stage: Callable[[Stage], None] | None = None,
        same_stages: dist.ProcessGroup | None = None,
        summed_over: dist.ProcessGroup | None = None,
    ) -> None:
        self._chain = chain_for(model)
        self._model = model
        self.group, self._same, self._summed_over = mesh.get_group("pipeline"), same_stages, summed_over
        self._rank, self._size = self.group.rank(), self.group.size()
        self._world, self._forward, self._schedule = world, forward, schedule
        self._dtype = next(nn.Module.parameters(model)).dtype
        self._owners = owners(schedule, num_ranks=self._size)
        self._num_stages = len(self._owners)
        self._spans = self._chain.spans(self._chain.costs(example_of(model)), num_stages=self._num_stages)
        self.sent = Sent(self._chain, self._spans, forward=forward, plain=self._dtype, dtype=send_dtype)
        own = [n for n, rank in enumerate(self._owners) if rank == self._rank]
        self.stages = self._chain.keep_own(self._spans, own=own, device=world.device)
        for number, stage in self.stages.items():
            stage.forward = partial(self._run_stage, stage, number)
            if cut_stage is not None:
                cut_stage(stage)
        self._chain.fill(list(self.stages.values()), device=world.device)
        self._buffers = {
            number: Buffers(model, among=self._chain.buffers(stage, self._spans[number]), broadcast=self.broadcast)
            for number, stage in self.stages.items()
        }
        self.buffers = list(self._buffers.values())
        self._schedules: dict[Any, Any] = {}
        self._loss_of: Callable[[Tree, MicroBatch], Tensor]  # of the current pass
        self._waiting: dict[int, list[MicroBatch]] = {}  # the micro-batches that each stage still has to run
        self._evaluated: MicroBatch | None = None
        self._index, self._turn = 0, ""
        self._parameters = [p for p in nn.Module.parameters(model) if p.requires_grad]
        self._shared = shared_weights(model, mesh=mesh)
        self.uncounted = {id(parameter) for parameter, group in self._shared if group.rank() != 0}

    @property
    def has_outputs(self) -> bool:
        """Whether this process has the last stage."""
        return self._num_stages - 1 in self.stages

    @property
    def broadcast(self) -> Callable[[Sequence[Tensor]], None] | None:
        """A function that overwrites tensors with those of the process in the first pipeline that has the same stages."""
        if (same := self._same) is None:
            return None
        return lambda tensors: broadcast_all({dist.get_global_rank(same, 0): tensors}, group=same)

    # --- one stage of one micro-batch

    def _run_stage(self, stage: Stage, number: int, /, *arguments: Any) -> Any:
        is_training = bool(self._waiting.get(number))
        micro_batch = self._waiting[number].pop(0) if is_training else self._evaluated
        assert micro_batch is not None
        self._forward.current = micro_batch
        if is_training:
            self._forward.seed_draws(step=self._index, micro_batch=micro_batch.number, turn=self._turn)
        is_last, inputs = number == self._num_stages - 1, micro_batch.inputs
        given = self.sent.unpacked(arguments, stage=number - 1, inputs=inputs)
        last = self._forward.for_loss if is_training else self._forward.in_precision
        compute = last if is_last else self._forward.under_autocast
        value = compute(lambda: self._chain.run(stage, self._spans[number], given, inputs))
        if is_training:
            self._buffers[number].end_forward(None if micro_batch.is_padding else micro_batch.number)
        if is_last:
            return self._loss_of(value, micro_batch) if is_training else value
        return self.sent.packed(value, stage=number, inputs=inputs)

    def run_stage(
        self, number: int, micro_batch: MicroBatch, given: Sequence[Tensor], *, loss_of: Callable[[Tree, MicroBatch], Tensor]
    ) -> tuple[Tensor, ...]:
        """Run one of this process's stages forward, in training, within a step that the caller has started.

        Return the tuple that the stage sends. For the last stage, return a tuple of `loss_of` the model's outputs.
        """
        self._loss_of, self._waiting = loss_of, {number: [micro_batch]}
        value = self.stages[number](*given)
        return value if isinstance(value, tuple) else (value,)

    # --- training

    def of(self, step: Step) -> Sequence[Sequence[MicroBatch]]:
        """Cut a step into passes, because a schedule is made for one shape, and a collate function can pad each differently.

        If stages are sharded, all ranks gather shards in each pass: then each micro-batch runs alone if the shapes differ on
        any rank. Collective.
        """
        passes = dict[tuple[Sequence[int], ...], list[MicroBatch]]()
        for micro_batch in step.micro_batches:
            self._forward.current = micro_batch
            shapes = [value.shape for sent in self.sent.like(micro_batch.inputs) for value in sent]
            passes.setdefault((tuple(micro_batch.num_tokens), *shapes), []).append(micro_batch)
        is_sharded = self._same is not None and self._summed_over is None
        if is_sharded and self._world.agreement.sum(torch.tensor([float(len(passes) > 1)])):
            return [[micro_batch] for micro_batch in step.micro_batches]
        return [*passes.values()]

    def begin(self, step: Step, *, index: int) -> None:
        """Set what the random draws of a step's forward passes depend on."""
        self._index, self._turn = index, step.turn

    def train(self, micro_batches: Sequence[MicroBatch], step: Step, *, index: int, factor: Factor, measure: bool) -> Sums:
        self.begin(step, index=index)
        sums = self.zeros(micro_batches[0], measure=measure)

        def loss_of(outputs: Tree, micro_batch: MicroBatch) -> Tensor:
            loss, more = self._forward.measured(outputs, micro_batch, measure=measure)
            add(sums, counted(more, micro_batch))
            return scaled(loss, factor, micro_batch).to(self._dtype)

        num_schedules = len(self._schedules)
        schedule = self._schedule_for(micro_batches)
        # keep the gradients so far: when a schedule runs for the first time, torch clears the gradients of shards
        held = [p.grad for p in self._parameters] if len(self._schedules) > num_schedules else []
        self._loss_of = loss_of
        self._waiting = {number: list(micro_batches) for number in self.stages}
        if held:
            self._model.zero_grad()
        try:
            # the first stage takes its inputs, and the last its targets, from `_waiting`, because torch would cut only tensors
            schedule.step(target=torch.empty(len(micro_batches)), return_outputs=False)
        except RuntimeError as error:
            raise (error.__cause__ or error) from None  # torch wraps a link's error in an error that prints all arguments
        for parameter, gradient in zip(self._parameters, held):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return sums

    def sum_gradients(self) -> None:
        """Sum the gradients of weights in several stages, and those of the pipelines. Collective."""
        for parameter, group in self._shared:
            if parameter.requires_grad:
                sum_gradients([parameter], group=group)
        if self._summed_over is not None:
            sum_gradients(self._parameters, group=self._summed_over)

    def _schedule_for(self, micro_batches: Sequence[MicroBatch]) -> Any:
        sent = self.sent.like(micro_batches[0].inputs)
        key = (len(micro_batches), *(tuple(value.shape) for one in sent for value in one))
        if key not in self._schedules:
            self._schedules[key] = self._new_schedule(sent, count=len(micro_batches))
        return self._schedules[key]

    def _new_schedule(self, sent: Sequence[tuple[Tensor, ...]], *, count: int) -> Any:
        """Return a schedule of `count` micro-batches, whose stages send tensors like these."""
        sent = [tuple(value.requires_grad_() for value in one) for one in sent]
        loss = torch.empty((), dtype=self._dtype, device="meta", requires_grad=True)  # the last stage's result
        stages = []
        for number, stage in self.stages.items():
            given, made = sent[number - 1] if number else (), sent[number] if number < len(sent) else loss
            where = (number, self._num_stages, self._world.device)
            stages.append(PipelineStage(stage, *where, input_args=given, output_args=made, group=self.group))
            greet_others_only(stages[-1], rank=self._rank)
        schedule, asked = make_schedule(self._schedule, stages, num_micro_batches=count)
        if self._world.rank == 0 and not self._schedules:
            kind = type(schedule).__name__.removeprefix("Schedule")
            waiting = waiting_share(schedule, num_micro_batches=count, num_ranks=self._size)
            LOGGER.info("pipeline: %d stages on %d processes, %d micro-batch%s in a pass (%s), %.0f %% of the time waiting",
                        self._num_stages, self._size, count, "es" * (count != 1), kind, 100 * waiting)  # fmt: skip
            if asked:
                LOGGER.warning("parallel.schedule: %s cannot run %d micro-batch%s in a pass, so %s is used (it takes %s; "
                               "micro_batch_size decides the number)",
                               self._schedule, count, "es" * (count != 1), kind, asked)  # fmt: skip
        return schedule

    def zeros(self, micro_batch: MicroBatch, *, measure: bool) -> Sums:
        """Return a zero for each measured sum: every rank must know its name, but only the last stage measures it."""
        self._forward.current = micro_batch
        outputs = self._chain.outputs(micro_batch.inputs)[-1]
        on_meta = micro_batch.mapped(lambda tensor: torch.empty_like(tensor, device="meta"))
        try:
            with torch.device("meta"):  # also what the task makes itself
                _, sums = self._forward.measured(outputs, on_meta, measure=measure)
        except NotImplementedError:  # the task reads numbers
            zeros = map_tensors(lambda tensor: torch.zeros_like(tensor, device=self._world.device), outputs)
            _, sums = self._forward.measured(zeros, micro_batch, measure=measure)
        return {name: torch.zeros((), dtype=value.dtype, device=self._world.device) for name, value in sums.items()}

    # --- evaluation

    def evaluate(self, micro_batches: Sequence[MicroBatch], step: Step, *, observe: bool) -> Sums:
        """Run the stages one after the other, each on its process. Collective."""
        sums: Sums = {}
        for micro_batch in micro_batches:
            self._waiting, self._evaluated = {}, micro_batch
            self._forward.current = micro_batch
            self._forward.seed_draws(step=None, micro_batch=micro_batch.number)
            outputs, is_whole = self._through_all_stages(micro_batch), self.has_outputs and not micro_batch.is_padding
            is_seen = is_whole and observe
            add(sums, self._forward.evaluated(outputs, micro_batch) if is_seen else self.zeros(micro_batch, measure=True))
        return sums

    def _through_all_stages(self, micro_batch: MicroBatch) -> Tree:
        value: Any = ()
        sent = self.sent.like(micro_batch.inputs)
        for number in range(self._num_stages):
            owner, before = self._owners[number], self._owners[number - 1]
            if number > 0 and owner != before:
                if self._rank == before:
                    for one in value:
                        dist.send(one.contiguous(), dst=dist.get_global_rank(self.group, owner), group=self.group)
                elif self._rank == owner:
                    value = tuple(torch.empty_like(one, device=self._world.device) for one in sent[number - 1])
                    for one in value:
                        dist.recv(one, src=dist.get_global_rank(self.group, before), group=self.group)
            if self._rank == owner:
                value = self.stages[number](*value)
        return value

    def outputs(self, inputs: Tree) -> Tree:
        raise no_whole_outputs()
