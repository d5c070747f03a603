"""Context parallelism: each sample's tokens are cut over the processes, for sequences longer than one device holds."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Engine, EngineAround, MicroBatch, Step, Sums
from framework.modules.structure import has_dropout, own_answer
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
    engine = replicated(model, world=world, forward=forward, mesh=mesh, **buckets)
    return ContextEngine(engine, cut=cut, dp_rank=mesh.get_local_rank("replicate"))


def problems(model: nn.Module, *, context: int, **others: object) -> list[str]:
    """Return why this model's tokens cannot be cut over so many processes."""
    any_model = "ddp, zero, fsdp and hsdp take any model"
    if own_answer(model, "mixers") is None:
        return [f"{type(model).__name__} does not answer mixers(), which lists the modules in which tokens meet; {any_model}"]
    if context > 1 and has_dropout(model):
        return ["the model has dropout, whose draws would depend on the number of processes; set model.dropout=0"]
    heads = getattr(model, "num_heads", context)
    if heads % context:
        return [f"context={context}: does not divide the {heads} heads of the model; take a divisor, or another "
                f"strategy: {any_model}"]  # fmt: skip
    return []


@dataclass(kw_only=True)
class Cut:
    """How the tokens of the current samples are cut over the ranks. The engine sets `length`, for its mixers."""

    rank: int
    size: int
    length: int = 0  # tokens of a whole sample

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return where a rank's tokens start and end; counts differ by one at most."""
        return rank * self.length // self.size, (rank + 1) * self.length // self.size

    @property
    def counts(self) -> list[int]:
        return [last - first for first, last in map(self.bounds, range(self.size))]

    @property
    def share(self) -> float:
        return self.counts[self.rank] / self.length

    def of(self, whole: MicroBatch) -> MicroBatch:
        """Return this rank's tokens; inputs and targets are (B, T)."""
        self.length = whole.inputs.shape[1]
        at = slice(*self.bounds(self.rank))
        return whole._replace(inputs=whole.inputs[:, at], targets=whole.targets[:, at])


class ContextEngine(EngineAround):
    """An Engine whose ranks run the same samples, a slice of the tokens each.

    A sample's loss is the mean over its tokens, so the weight of a slice is its share of the tokens.
    """

    def __init__(self, engine: Engine, *, cut: Cut, dp_rank: int) -> None:
        super().__init__(engine)
        self.dp_rank = dp_rank
        self.dp_size = engine.dp_size // cut.size
        self._cut = cut

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        mine = self._sliced(step)
        share = self._cut.share
        sums = self._engine.forward_backward(mine, index=index, loss_scale=loss_scale * share, measure=measure)
        return {name: value * share for name, value in sums.items()}

    def _sliced(self, step: Step) -> Step:
        return step._replace(micro_batches=[self._cut.of(micro_batch) for micro_batch in step.micro_batches])

    def forward(self, micro_batch: MicroBatch) -> Sums:
        sums = self._engine.forward(self._cut.of(micro_batch))
        return {name: value * self._cut.share for name, value in sums.items()}

    def warm_up(self, step: Step) -> None:
        self._engine.warm_up(self._sliced(step))


def by_heads(mix: Callable[..., Tensor], *, cut: Cut, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Wrap a mixer of (B, N, T, E) tensors, called with every head of some tokens, to run on all tokens of some heads.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
    """

    def run(*tensors: Tensor) -> Tensor:
        mixed = mix(*(_Exchange.apply(tensor, cut.counts, group, "to heads") for tensor in tensors))
        return _Exchange.apply(mixed, cut.counts, group, "to tokens")

    return run


class _Exchange(torch.autograd.Function):
    """All heads of some tokens <-> all tokens of some heads; each direction is the other's gradient."""

    @staticmethod
    def forward(ctx, tensor: Tensor, counts: list[int], group: dist.ProcessGroup, direction: str) -> Tensor:  # type: ignore[no-untyped-def,override]  # torch's own signature
        ctx.counts, ctx.group, ctx.direction = counts, group, direction
        return _exchange(tensor, counts=counts, group=group, direction=direction)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def,override]
        back = "to tokens" if ctx.direction == "to heads" else "to heads"
        return _exchange(gradient, counts=ctx.counts, group=ctx.group, direction=back), None, None, None


def _exchange(tensor: Tensor, *, counts: list[int], group: dist.ProcessGroup, direction: str) -> Tensor:
    if direction == "to heads":
        sent = list(tensor.chunk(group.size(), dim=1))
        shapes = [[*sent[0].shape[:2], count, *sent[0].shape[3:]] for count in counts]
    else:
        sent = list(tensor.split(counts, dim=2))
        shapes = [list(sent[group.rank()].shape)] * group.size()
    flat = torch.cat([part.flatten() for part in sent])
    sizes = [math.prod(shape) for shape in shapes]
    received = flat.new_empty(sum(sizes))
    dist.all_to_all_single(received, flat, sizes, [part.numel() for part in sent], group=group)
    parts = [part.view(shape) for part, shape in zip(received.split(sizes), shapes)]
    return torch.cat(parts, dim=2 if direction == "to heads" else 1)
