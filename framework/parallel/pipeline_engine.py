"""The Engine of a model whose layers lie on several processes."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from framework.engine import Forward, MicroBatch, Step, Sums, add, persistent_buffers
from framework.log import LOGGER
from framework.modules import chain_of
from framework.optim import BuildOptimizer, Trainable
from framework.parallel.chain import Shapes, costs_of, cut, drop, weighty
from framework.parallel.schedules import STAGES_PER_RANK, Loss, make_schedule, waiting_share
from framework.tree import map_tensors
from framework.world import World


class _Stage(nn.Module):
    """Some links of the chain, as one module. The engine says before each pass which micro-batches come."""

    def __init__(self, links: Sequence[nn.Module], *, engine: "PipelineEngine") -> None:
        super().__init__()
        self.links = nn.ModuleList(links)
        self._engine = (engine,)  # in a tuple: not a submodule, and no cycle of them

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self._engine[0].run_stage(self, arguments, named)


class PipelineEngine:
    """The Engine of a model whose layers lie on the processes of the mesh's `pipeline` axis.

    Every process along the other axis, if there is one, runs a pipeline of its own on its own samples.
    """

    def __init__(
        self, model: nn.Module, *, mesh: DeviceMesh, world: World, forward: Forward, schedule: str
    ) -> None:
        links = chain_of(model)
        assert links is not None  # `problems` has asked
        self.module = model
        self.mesh: DeviceMesh | None = mesh
        self._group = mesh.get_group("pipeline")
        self._replicas = mesh.get_group("replicate") if "replicate" in (mesh.mesh_dim_names or ()) else None
        self.dp_rank = self._replicas.rank() if self._replicas else 0
        self.dp_size = self._replicas.size() if self._replicas else 1
        self._rank, self._size = self._group.rank(), self._group.size()
        self._world = world
        self._forward = forward
        self._schedule = schedule
        self._dtype = next(model.parameters()).dtype
        self._shapes = Shapes(links)
        self._links = links
        self._stages: dict[int, _Stage] = {}  # this rank's, by number
        self._num_stages = self._size * STAGES_PER_RANK[schedule]
        self._cut(links)
        self._schedules: dict[Any, Any] = {}
        self._numbers: dict[int, list[int]] = {}  # of the micro-batches that are still to come, by stage
        self._index = 0
        self._buffers = persistent_buffers(model)
        self._after_first: dict[int, Tensor] = {}  # the buffers that micro-batch 0 has changed, by position
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._shared = self._find_shared()

    # --- the cut

    def _cut(self, links: list[nn.Module]) -> None:
        """Keep this rank's links, and those that share a weight with them. All ranks cut alike."""
        costs = costs_of(self.module, links, example=self._forward.example)
        groups = weighty(links)
        cuts = cut([sum(costs[i] for i in group) for group in groups], num_stages=self._num_stages)
        spans = [range(groups[part[0]][0], groups[part[-1]][-1] + 1) for part in cuts]
        owners = {i: number % self._size for number, span in enumerate(spans) for i in span}
        mine = {id(p) for i, link in enumerate(links) if owners[i] == self._rank for p in link.parameters()}
        for number, span in enumerate(spans):
            if number % self._size == self._rank:
                self._stages[number] = _Stage([links[i] for i in span], engine=self)
        for i, link in enumerate(links):
            if owners[i] != self._rank and not any(id(p) in mine for p in link.parameters()):
                drop(self.module, link)
        self._spans = spans
        self._ends = [span[-1] for span in spans]

    def _find_shared(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Return the weights that lie on several ranks of this pipeline (tied ones), each with their group. Collective."""
        mine = dict(self.module.named_parameters())
        everyone: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(everyone, (sorted(mine), self.dp_rank))
        holders: dict[tuple[int, str], list[int]] = {}
        for rank, (names, dp_rank) in enumerate(everyone):
            for name in names:
                holders.setdefault((dp_rank, name), []).append(rank)
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for ranks in sorted({tuple(r) for r in holders.values() if len(r) > 1}):  # every rank makes every group
            groups[ranks] = dist.new_group(list(ranks))
        return [(parameter, groups[tuple(holders[self.dp_rank, name])]) for name, parameter in mine.items()
                if len(holders[self.dp_rank, name]) > 1]  # fmt: skip

    # --- one stage of one micro-batch

    def run_stage(self, stage: _Stage, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        number = next(n for n, own in self._stages.items() if own is stage)
        micro_batch = self._numbers[number].pop(0) if self._numbers.get(number) else None
        if micro_batch is not None:
            self._forward.seed_draws(step=self._index, micro_batch=micro_batch)
        first, *rest = stage.links
        with torch.autocast(self._forward.device.type, dtype=self._forward.autocast, enabled=self._forward.autocast is not None):
            value = first(*arguments, **named)
            for link in rest:
                value = link(value)
        if micro_batch == 0:
            own = {id(buffer) for buffer in stage.buffers()}
            self._after_first |= {i: buffer.clone() for i, buffer in enumerate(self._buffers) if id(buffer) in own}
        # what goes to the next stage is of one type whatever autocast has made of it, in one piece, and no view, which
        # zero-bubble could not detach
        value = value.to(self._dtype).contiguous()
        return value.clone() if value._is_view() else value

    # --- training

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        self._index = index
        before = self._snapshot()
        self._after_first = {}
        sums: Sums = {name: torch.zeros((), device=self._world.device) for name in self._names(step, measure=measure)}
        for alike in _by_size(step.micro_batches):
            self._pass(alike, scale=loss_scale / step.num_samples, sums=sums, measure=measure)
        self._put_back([self._after_first.get(i, buffer) for i, buffer in enumerate(before)])
        for parameter, group in self._shared:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
        if self._replicas is not None:
            self._sum_over_replicas()
        return sums

    def _pass(self, micro_batches: list[MicroBatch], *, scale: float, sums: Sums, measure: bool) -> None:
        """Send micro-batches of one size through the pipeline, forward and back."""
        waiting = list(micro_batches)

        def loss_of(outputs: Any, targets: Tensor) -> Tensor:
            micro_batch = waiting.pop(0)  # the last stage sees them in order
            loss = self._forward.task.loss(outputs, targets)
            if micro_batch.is_padding:
                return loss * 0.0
            add(sums, {"loss": loss.detach()})
            if measure:
                add(sums, self._forward.task.metrics(map_tensors(Tensor.detach, outputs), targets))
            return loss * scale

        schedule, runner = self._schedule_for(micro_batches)
        runner.loss_of = loss_of
        for number in self._stages:
            self._numbers[number] = [micro_batch.number for micro_batch in micro_batches]
        inputs = torch.cat([m.inputs for m in micro_batches]) if 0 in self._stages else None
        targets = torch.cat([m.targets for m in micro_batches]) if self._num_stages - 1 in self._stages else None
        arguments = () if inputs is None else (inputs,)
        schedule.step(*arguments, **({} if targets is None else {"target": targets}), return_outputs=False)

    def _schedule_for(self, micro_batches: list[MicroBatch]) -> tuple[Any, Loss]:
        """Return the schedule for so many micro-batches of this size, made when it is first needed."""
        inputs = micro_batches[0].inputs
        key = (len(micro_batches), tuple(inputs.shape))
        if key not in self._schedules:
            runner = Loss()
            outputs = [value.to(self._dtype).contiguous() for value in self._shapes.outputs(inputs)]
            stages = []
            for number, stage in self._stages.items():
                given = inputs if number == 0 else outputs[self._ends[number - 1]]
                stages.append(
                    PipelineStage(
                        stage,
                        number,
                        self._num_stages,
                        self._world.device,
                        input_args=_like(given, requires_grad=number > 0),
                        output_args=_like(outputs[self._ends[number]], requires_grad=True),
                        group=self._group,
                    )
                )
            schedule = make_schedule(self._schedule, stages, num_micro_batches=len(micro_batches), loss=runner)
            if self._world.rank == 0 and not self._schedules:
                LOGGER.info("pipeline: %d stages on %d processes, %d micro-batches (%s): %.0f %% of the time is waiting",
                            self._num_stages, self._size, len(micro_batches), type(schedule).__name__.removeprefix("Schedule"),
                            100 * waiting_share(schedule, num_micro_batches=len(micro_batches), num_ranks=self._size))  # fmt: skip
            self._schedules[key] = schedule, runner
        return self._schedules[key]

    def _sum_over_replicas(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sent = [dist.all_reduce(p.grad, group=self._replicas, async_op=True) for p in self._parameters if p.grad is not None]
        for work in sent:
            work.wait()

    def _names(self, step: Step, *, measure: bool) -> list[str]:
        """Return what is measured: every rank must know, the last stage alone measures."""
        if not measure:
            return ["loss"]
        first = step.micro_batches[0]
        return ["loss", *self._metric_names(first)]

    def _metric_names(self, micro_batch: MicroBatch) -> list[str]:
        outputs = self._shapes.outputs(micro_batch.inputs)[-1]
        targets = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), micro_batch.targets)
        return list(self._forward.task.metrics(outputs, targets))

    # --- evaluation

    def forward(self, micro_batch: MicroBatch) -> Sums:
        """Run the stages one after the other, each where it lies."""
        names = ["loss", *self._metric_names(micro_batch)]
        outputs = self._shapes.outputs(micro_batch.inputs)
        value: Any = micro_batch.inputs
        with torch.no_grad():
            for number in range(self._num_stages):
                owner, before = number % self._size, (number - 1) % self._size
                if number > 0 and owner != before:
                    if self._rank == before:
                        dist.send(value.contiguous(), dst=dist.get_global_rank(self._group, owner), group=self._group)
                    elif self._rank == owner:
                        value = torch.empty(outputs[self._ends[number - 1]].shape, dtype=self._dtype, device=self._world.device)
                        dist.recv(value, src=dist.get_global_rank(self._group, before), group=self._group)
                if self._rank == owner:
                    value = self._stages[number](value)
            if self._num_stages - 1 not in self._stages or micro_batch.is_padding:
                return {name: torch.zeros((), device=self._world.device) for name in names}
            sums = {"loss": self._forward.task.loss(value, micro_batch.targets)}
            return sums | self._forward.task.metrics(value, micro_batch.targets)

    # --- the rest of an Engine

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        foreign = {id(parameter) for parameter, group in self._shared if group.rank() != 0}  # counted elsewhere
        own = [p.grad for p in self._parameters if p.grad is not None and id(p) not in foreign]
        square = torch.nn.utils.get_total_norm(own).square() if own else torch.zeros((), device=self._world.device)
        square = square.to(self._dtype)
        dist.all_reduce(square, group=self._group)
        norm = square.sqrt()
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
        return norm

    def warm_up(self, step: Step) -> None:
        pass

    def sync_buffers(self) -> None:
        if self._replicas is not None:
            for buffer in self._buffers:
                dist.broadcast(buffer, src=dist.get_global_rank(self._replicas, 0), group=self._replicas)

    def can_pause(self, step: int) -> bool:
        return True

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        # a stage without weights updates a stand-in, since no optimizer takes none
        return build(trained or [Trainable("", nn.Parameter(torch.zeros(1, device=self._world.device)), False)])

    def _snapshot(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self._buffers]

    def _put_back(self, buffers: list[Tensor]) -> None:
        if buffers:
            torch._foreach_copy_(self._buffers, buffers)


def _by_size(micro_batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
    """Group micro-batches by their size, in order: a schedule is made for one shape."""
    groups: dict[int, list[MicroBatch]] = {}
    for micro_batch in micro_batches:
        groups.setdefault(len(micro_batch.targets), []).append(micro_batch)
    return list(groups.values())


def _like(tensor: Tensor, *, requires_grad: bool) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(requires_grad and tensor.is_floating_point())
