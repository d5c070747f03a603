"""Context parallelism: each sample's tokens are cut over the processes, for sequences longer than one device holds."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Demands, Engine, EngineAround, MicroBatch, Step, Task
from framework.engine.sums import Sums, Value
from framework.modules.parts import own_answer
from framework.modules.structure import has_dropout
from framework.parallel.ddp import Buckets, replicated


def context(
    model: nn.Module, *, world: World, forward: Forward, replicate: int | None, context: int | None, **buckets: Unpack[Buckets]
) -> Engine:
    """Replicate the model; the processes along the inner axis of the mesh share the tokens of the same samples. Collective."""
    mesh = world.mesh(replicate=replicate, context=context)
    group = mesh.get_group("context")
    cut = Cut(rank=group.rank(), size=group.size())
    for mixer in model.mixers():  # type: ignore[operator]  # `problems` has checked that it answers
        mixer.forward = by_heads(mixer.forward, cut=cut, group=group)
    forward.task = OfSlices(forward.task, cut)
    engine = replicated(model, world=world, forward=forward, mesh=mesh, **buckets)
    return ContextEngine(engine, cut=cut, dp_rank=mesh.get_local_rank("replicate"))


def problems(model: nn.Module, *, demands: Demands, context: int, **others: object) -> list[str]:
    """Return why this model's tokens cannot be cut over so many processes."""
    most_models = "ddp, zero, fsdp and hsdp take most models"
    if demands.own_step:
        return [f"context: cuts samples, and the task has a step of its own, which wants them whole; {most_models}"]
    if demands.observes and context > 1:
        cure = "another strategy" if demands.observes == "mode" else "metric=none, or another strategy"
        what = "takes the outputs of whole samples, and under context a process has a part of each"
        return [f"{demands.observes}: {what}; {cure}"]
    if own_answer(model, "mixers") is None:
        return [f"{type(model).__name__} does not answer mixers(), which lists the modules in which tokens meet; {most_models}"]
    if context > 1 and has_dropout(model):
        return ["the model has dropout, whose draws would depend on the number of processes; set model.dropout=0"]
    heads = getattr(model, "num_heads", context)
    if heads % context:
        return [f"context={context}: does not divide the {heads} heads of the model; take a divisor, or another "
                f"strategy: {most_models}"]  # fmt: skip
    return []


@dataclass(kw_only=True)
class Cut:
    """How the tokens of the current samples are cut over the ranks."""

    rank: int
    size: int
    counts: list[int] = field(default_factory=list)  # of each rank's tokens in a sample; they differ by one at most

    @property
    def share(self) -> float:
        return self.counts[self.rank] / sum(self.counts)

    def of(self, whole: MicroBatch) -> MicroBatch:
        """Return this rank's tokens; inputs and targets are (B, T). The mixers then exchange `counts` tokens."""
        inputs, targets = (tensor.tensor_split(self.size, dim=1) for tensor in (whole.inputs, whole.targets))
        self.counts = [part.shape[1] for part in inputs]
        return whole._replace(inputs=inputs[self.rank], targets=targets[self.rank])


class OfSlices:
    """A task of slices of samples.

    A sum with a weight of its own is a sum over tokens; any other is a sum over samples of what is a mean over their
    tokens, so a slice adds its share.
    """

    def __init__(self, task: Task, cut: Cut) -> None:
        self._task, self._cut = task, cut

    def loss(self, outputs: Any, targets: Any) -> Value:
        return self._of_slice(self._task.loss(outputs, targets))

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Value]:
        return {name: self._of_slice(value) for name, value in self._task.metrics(outputs, targets).items()}

    def _of_slice(self, value: Value) -> Value:
        return value if isinstance(value, tuple) else value * self._cut.share


class ContextEngine(EngineAround):
    """An Engine whose ranks run the same samples, a slice of the tokens each."""

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

    def warm_up(self, step: Step) -> None:
        self._engine.warm_up(self._sliced(step))


Parts = tuple[int, list[int]]  # how a tensor is cut over the ranks: a dim, and the size of each rank's part


def by_heads(mix: Callable[..., Tensor], *, cut: Cut, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Wrap a mixer of (B, N, T, E) tensors, called with every head of some tokens, to run on all tokens of some heads.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
    """

    def run(*tensors: Tensor) -> Tensor:
        tokens = 2, cut.counts
        mixed = mix(*(_Exchange.apply(t, (1, [t.shape[1] // cut.size] * cut.size), tokens, group) for t in tensors))
        return _Exchange.apply(mixed, tokens, (1, [mixed.shape[1]] * cut.size), group)

    return run


class _Exchange(torch.autograd.Function):
    """All heads of some tokens <-> all tokens of some heads. The gradient is exchanged back."""

    @staticmethod
    def forward(ctx, tensor: Tensor, sent: Parts, received: Parts, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def,override]  # torch's own signature
        ctx.back = received, sent, group
        return _exchange(tensor, sent, received, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def,override]
        return _exchange(gradient, *ctx.back), None, None, None


def _exchange(tensor: Tensor, sent: Parts, received: Parts, group: dist.ProcessGroup) -> Tensor:
    """Send each rank its part along one dim; join the parts received from the ranks along another."""
    dim, sizes = received
    parts = tensor.split(sent[1], dim=sent[0])
    shape = parts[group.rank()].shape
    shapes = [[*shape[:dim], size, *shape[dim + 1 :]] for size in sizes]
    flat = torch.cat([part.flatten() for part in parts])
    counts = [math.prod(shape) for shape in shapes]
    result = flat.new_empty(sum(counts))
    dist.all_to_all_single(result, flat, counts, [part.numel() for part in parts], group=group)
    return torch.cat([part.view(shape) for part, shape in zip(result.split(counts), shapes)], dim=dim)
