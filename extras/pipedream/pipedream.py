"""PipeDream: a pipeline without a flush between steps; each stage steps with gradients of older batches. NOT one process."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from annotated_types import Ge
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.engine.seam import Demands, MicroBatch, Step
from framework.engine.sums import Sums, add, weight_of
from framework.modules.tensors import Tree
from framework.optim.optimizers import stand_in
from framework.parallel import pipeline as flushed
from framework.parallel.pipelining.own_forward import chain_for
from framework.parallel.pipelining.passes import Pipeline
from framework.parallel.pipelining.schedules import Balance
from framework.parallel.pipelining.sent import SendDtype
from framework.runtime.log import LOGGER

DRAIN_EVERY = 50  # steps; the default


def pipedream(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    pipeline: int | None,
    send_dtype: SendDtype = None,
    balance: Balance = "operations",
    drain_every: Annotated[int, Ge(1)] | None = None,
) -> Engine:
    """Cut the model over all processes, as `parallel=pipeline` does. Collective."""
    mesh, drain_every = world.mesh(pipeline=pipeline), drain_every or DRAIN_EVERY
    return PipeDream(model, world=world, forward=forward, mesh=mesh, drain_every=drain_every, send_dtype=send_dtype)


def fills(node: Any) -> bool:
    """Return True: each rank holds a part of the model, which rank 0 sends."""
    return True


def exact_options(**options: object) -> None:
    """Return None: this strategy never computes the same as one process, unless it is drained in every step."""


def num_due(num_under_way: int, *, delay: int, is_drained: bool) -> int:
    """Return how many batches a stage runs backward in a step, oldest first, of those with only a forward pass so far."""
    return max(0, num_under_way - (0 if is_drained else delay))


@dataclass(eq=False)
class _UnderWay:
    """A batch that has not yet had its backward pass through this stage."""

    passes: list[tuple[Sequence[Tensor], Sequence[Tensor]]]  # for each micro-batch, what the stage has received and made
    weights: list[Tensor]  # the weights of its forward pass (the stash)
    versions: list[int]
    num_updates: int  # updates of this stage before the batch
    scale: Tensor  # the factor of the loss, shape (); only the last stage uses it


class PipeDream(Engine):
    """A pipeline's Engine without a flush: in each step a stage runs the new batch forward and an older batch backward.

    Stage s of n runs batch t forward, then batch t - (n - 1 - s) backward with the weights of that batch's forward pass, and
    steps with its gradient. So a stage never waits for the pipeline to empty, and its gradients are n - 1 - s updates late. A
    minibatch of the paper is a global batch here, with the sum of its micro-batches' gradients. Older weights are kept by
    reference: the optimizer's step gets a copy. A stage has n - s versions of its weights, and activations of as many batches.

    In every `drain_every`-th step, and in the last step, a stage adds up the gradients of all batches that it still has. Then
    no batch waits for its backward pass. Only then can a checkpoint be saved, so that a resumed run computes the same bits.
    With `drain_every=1` the pipeline is flushed in every step. Each stage clips by its own norm, because for a norm over all
    stages, the stages would have to wait for each other.
    Sources: Harlap et al. 2018, "PipeDream: fast and efficient pipeline parallel DNN training"; Narayanan et al. 2019.
    """

    def __init__(
        self, model: nn.Module, *, world: World, forward: Forward, mesh: DeviceMesh, drain_every: int, **options: Any
    ) -> None:
        self._pipeline = Pipeline(model, mesh=mesh, world=world, forward=forward, schedule="1f1b", **options)
        super().__init__(
            module=model, forward=forward, passes=self._pipeline, mesh=mesh, is_counted=self._pipeline.has_outputs,
            broadcast=self._pipeline.broadcast, parts={"drain": self},
            make_optimizer=lambda build, trained: build(trained or stand_in(world.device)),  # all may be frozen
        )  # fmt: skip
        self._device, self._drain_every = world.device, drain_every
        self._number, self._last = world.rank, world.world_size - 1
        self._delay = self._last - self._number
        # a separate group: under NCCL, messages of two processes in two directions would wait in one queue
        self._backward_group = world.groups.new_group()
        self._connect()
        self._under_way: deque[_UnderWay] = deque()
        self._sends: list[list[tuple[dist.Work, Tensor]]] = [[]]  # of the step before, and of this step
        self._num_updates = 0
        self._is_measured = self._is_drained = False
        if world.rank == 0:
            LOGGER.info("pipeline: %d stages on as many processes (PipeDream): stage s steps by gradients %d - s updates late, "
                        "and every %d-th step uses all remaining gradients",
                        world.world_size, self._last, drain_every)  # fmt: skip

    def train(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        self._is_measured = measure
        self._sends = [self._sends[-1], []]
        sums = self._pipeline.zeros(step.micro_batches[0], measure=measure)
        self._pipeline.begin(step, index=index)
        for buffers in self._pipeline.buffers:
            buffers.begin_step(is_alone=[micro_batch.number for micro_batch in step.micro_batches] == [0])
        self._run_forward(step, sums=sums, loss_scale=loss_scale, measure=measure)
        for buffers in self._pipeline.buffers:
            buffers.end_step()
        count = num_due(len(self._under_way), delay=self._delay, is_drained=self._is_drained)
        late = [self._run_backward() for _ in range(count)]
        self._num_updates += bool(late)
        if self._under_way:  # the optimizer must not change what their backward passes need
            for parameter in self._parameters:
                parameter.data = parameter.data.clone()
        self._wait_for_sends(all_of_them=self._is_drained)
        if measure:
            values = {"staleness": sum(late), weight_of("staleness"): len(late)}
            sums |= {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        return sums

    # --- as a part of the loop

    def step_begun(self, loop: Any) -> None:
        self._is_drained = self._is_drain(loop.step + 1, loop)

    def can_save(self, loop: Any) -> bool:
        return self._is_drain(loop.step, loop)

    def _is_drain(self, step: int, loop: Any) -> bool:
        return bool(step % self._drain_every == 0 or step >= loop.total_steps)

    # --- the passes of a step

    def _run_forward(self, step: Step, *, sums: Sums, loss_scale: float, measure: bool) -> None:
        def loss_of(outputs: Tree, micro_batch: MicroBatch) -> Tensor:
            loss, more = self.forward.measured(outputs, micro_batch, measure=measure)
            add(sums, more)
            return loss

        weights, versions = [p.data for p in self._parameters], [p._version for p in self._parameters]
        passes: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        for micro_batch in step.micro_batches:
            kinds = self._pipeline.sent.like(micro_batch.inputs)[self._number - 1] if self._number > 0 else ()
            received = [torch.empty_like(kind, device=self._device) for kind in kinds]
            for tensor in received:
                dist.recv(tensor, src=self._number - 1)
                tensor.requires_grad_()
            made = self._pipeline.run_stage(self._number, micro_batch, received, loss_of=loss_of)
            passes.append((received, made))
            for tensor in made if self._number < self._last else ():
                self._send(tensor.detach(), to=self._number + 1, group=None)
        self._under_way.append(_UnderWay(passes, weights, versions, self._num_updates, _scale(step, sums, loss_scale)))

    def _run_backward(self) -> int:
        """Run the oldest batch backward, with the weights of its forward pass; return the number of updates since then."""
        batch = self._under_way.popleft()
        now = [p.data for p in self._parameters], [p._version for p in self._parameters]
        self._use_weights(batch.weights, batch.versions)
        for received, made in batch.passes:
            gradients = [batch.scale.to(made[0])] if self._number == self._last else [torch.empty_like(one) for one in made]
            for gradient in gradients if self._number < self._last else ():
                dist.recv(gradient, src=self._number + 1, group=self._backward_group)
            trained = [number for number, one in enumerate(made) if one.requires_grad]
            if trained:  # a stage may have only frozen weights
                torch.autograd.backward([made[n] for n in trained], [gradients[n] for n in trained])
            for tensor in received:
                sent = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self._send(sent, to=self._number - 1, group=self._backward_group)
        self._use_weights(*now)
        return self._num_updates - batch.num_updates

    def _connect(self) -> None:
        """Connect the neighbours: gloo's first send waits until the other side receives, which happens one step later."""
        nothing = torch.zeros(1, device=self._device)
        if self._number > 0:
            dist.send(nothing, dst=self._number - 1, group=self._backward_group)
        if self._number < self._last:
            dist.recv(nothing, src=self._number + 1, group=self._backward_group)

    def _use_weights(self, weights: Sequence[Tensor], versions: Sequence[int]) -> None:
        for parameter, weight in zip(self._parameters, weights):
            parameter.data = weight
        # a backward pass accepts only tensors with the versions that its forward pass has seen
        torch._C._autograd._unsafe_set_version_counter(tuple(self._parameters), tuple(versions))

    def _send(self, tensor: Tensor, *, to: int, group: dist.ProcessGroup | None) -> None:
        work = dist.isend(tensor, dst=to, group=group)
        assert work is not None
        self._sends[-1].append((work, tensor))

    def _wait_for_sends(self, *, all_of_them: bool) -> None:
        """Wait for the messages of the step before; with `all_of_them`, also of this step (neighbours receive none later)."""
        for sends in self._sends if all_of_them else self._sends[:-1]:
            for work, _ in sends:
                work.wait()
            sends.clear()

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip by this stage's own norm. In a measured step and before a checkpoint, return the norm over all stages."""
        norm = get_total_norm([p.grad for p in self._parameters if p.grad is not None]).to(self._device)
        if max_norm is not None:
            clip_grads_with_norm_(self._parameters, max_norm, norm)
        if max_norm is not None and not self._is_measured:
            return norm
        square = norm.double().square()
        dist.all_reduce(square)
        return square.sqrt()


def _scale(step: Step, sums: Sums, loss_scale: float) -> Tensor:
    """Return the factor of the sum of a batch's losses; only the last stage's factor counts."""
    weight = sums.get(weight_of("loss"))
    if weight is None:
        return torch.tensor(loss_scale / step.num_samples, dtype=torch.float64)
    return torch.where(weight > 0, loss_scale / weight, 0.0)


def problems(model: nn.Module, *, demands: Demands, pipeline: int, drain_every: int | None = None, **others: Any) -> list[str]:
    """Return why a model or a run does not work with a pipeline that is not flushed."""
    if found := flushed.problems(model, demands=demands, pipeline=pipeline, schedule="1f1b", **others):
        return found
    drain_every = drain_every or DRAIN_EVERY
    links = chain_for(model).links_of_parameters()
    names = [name for name, parameter in model.named_parameters() if len(links[id(parameter)]) > 1]
    if names:
        return [f"schedule=pipedream: {names[0]} is in several layers, and the stages would change it at different times; "
                "1f1b takes it"]  # fmt: skip
    at_odds = {
        "optimizer.turns": "several optimizers" if demands.turns else None,
        "part": ", ".join(demands.parts) or None,
        "trainer.divergence.action": demands.recovers,
        "precision": "fp16 (its loss scale needs the global norm of every step)" if demands.scales_loss else None,
    }
    found = [f"{key}: {value}, but under parallel.schedule=pipedream each stage is at a different step (1f1b for that)"
             for key, value in at_odds.items() if value is not None]  # fmt: skip
    periods = {"trainer.eval_every": demands.eval_every, "checkpoint.every": demands.checkpoint_every}
    return found + [f"{key}: {every} is not a multiple of parallel.drain_every={drain_every} (only then all are at one step)"
                    for key, every in periods.items() if isinstance(every, str) or (every or 0) % drain_every]  # fmt: skip
