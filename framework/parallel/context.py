"""Context parallelism: the tokens of each sample are cut over the processes, for sequences too long for one device."""

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Demands, Engine, EngineAround, MicroBatch, Step, no_whole_outputs
from framework.engine.sums import Sums
from framework.modules.parts import own_answer
from framework.modules.structure import has_dropout
from framework.modules.tensors import Tree
from framework.parallel.attention.cut import Cut, OfSlices
from framework.parallel.attention.fit import Attention, attention_of, num_heads, ring_fault
from framework.parallel.attention.ring import round_ring
from framework.parallel.attention.ulysses import by_heads
from framework.parallel.ddp import Buckets, replicated


def context(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    context: int | None,
    attention: Attention | None = None,
    **buckets: Unpack[Buckets],
) -> Engine:
    """Replicate the model; processes along the inner axis of the mesh share the tokens of the same samples. Collective."""
    mesh = world.mesh(replicate=replicate, context=context)
    cut = cut_tokens(model, forward=forward, group=mesh.get_group("context"), attention=attention)
    engine = replicated(model, world=world, forward=forward, mesh=mesh, **buckets)
    return ContextEngine(engine, cut=cut, dp_rank=mesh.get_local_rank("replicate"))


def cut_tokens(model: nn.Module, *, forward: Forward, group: dist.ProcessGroup, attention: Attention | None) -> Cut:
    """Let the model's mixers read the tokens of all ranks of the group, and let the task take slices. Not collective."""
    rank, size = group.rank(), group.size()
    is_ring = attention_of(model, asked=attention, context=size) == "ring"
    cut = Cut.zigzag(rank=rank, size=size) if is_ring else Cut.contiguous(rank=rank, size=size)
    wrap = round_ring if is_ring else by_heads
    # several layers can share a mixer. `problems` has checked that the method exists
    for mixer in dict.fromkeys(model.mixers()):  # type: ignore[operator]
        # compiled code ends before the mixer and starts again after it: the mixer's communication is not part of a graph
        mixer.forward = torch.compiler.disable(wrap(mixer.forward, cut=cut, group=group))
    forward.task = OfSlices(forward.task, cut)
    return cut


def problems(
    model: nn.Module, *, demands: Demands, context: int, attention: Attention | None = None, **others: object
) -> list[str]:
    """Return why this model's tokens cannot be cut over so many processes."""
    most_models = "ddp, zero, fsdp and hsdp take most models"
    if demands.own_step:
        return [f"context: cuts samples, but the task has its own step, which needs whole samples; {most_models}"]
    if demands.observes and context > 1:
        cure = "another strategy" if demands.observes == "mode" else f"without {demands.observes}, or another strategy"
        what = "needs the outputs of whole samples, but with context a process has only a part of each sample"
        return [f"{demands.observes}: {what}; {cure}"]
    if own_answer(model, "mixers") is None:
        return [f"{type(model).__name__} does not have mixers(), which lists the modules that combine tokens; {most_models}"]
    if context > 1 and has_dropout(model):
        return ["the model has dropout, and its draws would depend on the number of processes; set model.dropout=0"]
    heads = next((heads for heads in sorted(num_heads(model)) if heads % context), None)
    if attention_of(model, asked=attention, context=context) == "ring":
        fault = ring_fault(model) if context > 1 else None
        if fault is None:
            return []
        if attention is None:
            return [f"context={context}: does not divide the {heads} heads of the model, and its mixers cannot use a ring "
                    f"({fault}); take a divisor, or another strategy: {most_models}"]  # fmt: skip
        return [f"attention=ring: {fault}; take ulysses, or another strategy: {most_models}"]
    if heads is not None:
        return [f"context={context}: does not divide the {heads} heads of the model; take a divisor, attention=ring, or "
                f"another strategy: {most_models}"]  # fmt: skip
    return []


class ContextEngine(EngineAround):
    """An Engine for ranks that run the same samples; each rank has a slice of the tokens."""

    def __init__(self, engine: Engine, *, cut: Cut, dp_rank: int) -> None:
        super().__init__(engine)
        self.dp_rank, self.dp_size = dp_rank, engine.dp_size // cut.size
        self._cut = cut

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        return self._engine.forward_backward(self._sliced(step), index=index, loss_scale=loss_scale, measure=measure)

    def _sliced(self, step: Step) -> Step:
        return step._replace(micro_batches=[self._cut.of(micro_batch) for micro_batch in step.micro_batches])

    def forward(self, micro_batch: MicroBatch) -> Sums:
        return self._engine.forward(self._cut.of(micro_batch))

    def evaluate(self, step: Step) -> Sums:
        return self._engine.evaluate(self._sliced(step))

    def outputs(self, inputs: Tree) -> Tree:
        raise no_whole_outputs()

    def warm_up(self, step: Step) -> None:
        self._engine.warm_up(self._sliced(step))
