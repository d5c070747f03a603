"""Context parallelism: each process has a run of the tokens of each sample, and a model's mixers read the tokens of all.

Shapes of a mixer's tensors: B samples, N heads, T tokens, E dim of a head.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from framework.engine.forward import Forward, loss_weight_of
from framework.engine.rows import gather_rows
from framework.engine.seam import Demands, MicroBatch, Task
from framework.engine.sums import Value
from framework.modules.parts import own_answer
from framework.parallel.exchange import Exchange
from framework.runtime.exits import Unfit
from framework.runtime.log import LOGGER

Attention = Literal["ulysses", "ring"]
Mix = Callable[..., Tensor]
ONE_CALL = "its forward must call scaled_dot_product_attention once, and nothing else in it may combine tokens"


@dataclass
class Slices:
    """The runs of tokens of the current samples, one for each rank of `group`; their lengths differ by at most one."""

    group: dist.ProcessGroup
    forward: Forward

    @property
    def counts(self) -> list[int]:
        """The number of each rank's tokens."""
        assert self.forward.current is not None
        return [*self.forward.current.num_tokens]

    @property
    def span(self) -> tuple[int, int]:
        """The positions of this rank's tokens in a sample: the first, and the one after the last."""
        stop = [*accumulate(self.counts)][self.group.rank()]
        return stop - self.counts[self.group.rank()], stop

    @property
    def share(self) -> float:
        return self.counts[self.group.rank()] / sum(self.counts)

    def of(self, whole: MicroBatch) -> MicroBatch:
        """Return this rank's tokens; inputs and targets are (B, T). Unfit if they are not."""
        tensors = whole.inputs, whole.targets
        lengths = {one.shape[1] if isinstance(one, Tensor) and one.ndim > 1 else None for one in tensors}
        if len(lengths) > 1 or None in lengths:
            what = "context cuts the tokens of each sample, but this batch's inputs and targets are not two tensors (B, T)"
            raise Unfit(f"parallel: {what} (ddp or fsdp)")
        counts = [part.shape[1] for part in whole.inputs.tensor_split(self.group.size(), dim=1)]
        inputs, targets = (tokens.split(counts, dim=1)[self.group.rank()] for tokens in tensors)
        return whole._replace(inputs=inputs, targets=targets, num_tokens=counts)


class OfSlices:
    """A task for slices of samples.

    A value with its own weight is a sum over tokens. Any other value is a sum over samples of a mean over the tokens of the
    sample, so a slice adds its share.
    """

    def __init__(self, task: Task, slices: Slices) -> None:
        self._task, self._slices = task, slices

    @property
    def loss_weight(self) -> Any:
        """The task's weight of a slice; None if it has none."""
        return loss_weight_of(self._task)

    def loss(self, outputs: Any, targets: Any) -> Value:
        loss = self._task.loss(outputs, targets)
        return loss if self.loss_weight is not None else self._of_slice(loss)

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Value]:
        values = self._task.metrics(outputs, targets)
        _warn_of(tuple(name for name, value in values.items() if not isinstance(value, tuple)))
        return {name: self._of_slice(value) for name, value in values.items()}

    def _of_slice(self, value: Value) -> Value:
        return value if isinstance(value, tuple) else value * self._slices.share


@cache
def _warn_of(names: tuple[str, ...]) -> None:
    """Warn, once, of values without a weight: no comparison of a few samples shows whether they look at whole samples."""
    if names and dist.get_rank() == 0:
        what = "under context, a value without its weight counts as a mean over the tokens of each sample"
        LOGGER.warning("task: %s: %s (a value that looks at whole samples is wrong: ddp or fsdp)", ", ".join(names), what)


def problems(model: nn.Module, *, demands: Demands, context: int) -> list[str]:
    """Return why this run's tokens cannot be cut over so many processes."""
    most_models = "ddp, zero, fsdp and hsdp take most models"
    if demands.own_step:
        return [f"context: cuts samples, but the task has its own step, which needs whole samples; {most_models}"]
    if demands.observes and context > 1:
        cure = "another strategy" if demands.observes == "mode" else f"without {demands.observes}, or another strategy"
        what = "needs the outputs of whole samples, but with context a process has only a part of each sample"
        return [f"{demands.observes}: {what}; {cure}"]
    if own_answer(model, "mixers") is None:
        return [f"{type(model).__name__} does not have mixers(), which lists the modules that combine tokens; {most_models}"]
    return []


def cut_tokens(model: nn.Module, *, forward: Forward, group: dist.ProcessGroup, attention: Attention | None) -> Slices:
    """Let the model's mixers read the tokens of all ranks of the group, and let the task take slices. Not collective.

    `attention` None: by heads if the number of processes divides them, else with all keys and values.
    """
    slices = Slices(group, forward)
    for mixer in dict.fromkeys(model.mixers()):  # type: ignore[operator]  # several layers can share a mixer
        # compiled code ends before the mixer and starts again after it: the mixer's communication is not part of a graph
        mixer.forward = torch.compiler.disable(_mixing(mixer.forward, slices=slices, attention=attention))
    forward.task = OfSlices(forward.task, slices)
    return slices


def _mixing(mix: Mix, *, slices: Slices, attention: Attention | None) -> Mix:
    """Wrap a mixer of (B, N, T, E) tensors: callers give this rank's tokens, and it reads the tokens of all ranks."""

    def run(*tensors: Tensor) -> Tensor:
        heads = next((t.shape[1] for t in tensors if t.shape[1] % slices.group.size()), None)
        if attention == "ulysses" and heads is not None:
            what = f"ulysses, but parallel.context={slices.group.size()} does not divide the {heads} heads of a mixer"
            raise Unfit(f"parallel.attention: {what} (ring, or a divisor)")
        is_by_heads = heads is None and attention != "ring"
        return by_heads(mix, tensors, slices) if is_by_heads else with_all_keys(mix, tensors, slices)

    return run


# --- all tokens of some heads


def by_heads(mix: Mix, tensors: tuple[Tensor, ...], slices: Slices) -> Tensor:
    """Run a mixer on all tokens of some heads. Source: Jacobs et al. 2023, "DeepSpeed Ulysses"."""
    tokens, size, group = (2, slices.counts), slices.group.size(), slices.group
    mixed = mix(*(_exchange(t, (1, [t.shape[1] // size] * size), tokens, group) for t in tensors))
    return _exchange(mixed, tokens, (1, [mixed.shape[1]] * size), group)


Parts = tuple[int, list[int]]  # how a tensor is cut over the ranks: a dim, and the size of each rank's part


def _exchange(tensor: Tensor, sent: Parts, received: Parts, group: dist.ProcessGroup) -> Tensor:
    """Send each rank its part along one dim; join the received parts along another dim. Differentiable."""
    dim, sizes = received
    parts = tensor.split(sent[1], dim=sent[0])
    shape = parts[group.rank()].shape
    shapes = [[*shape[:dim], size, *shape[dim + 1 :]] for size in sizes]
    counts = [part.numel() for part in parts], [math.prod(shape) for shape in shapes]
    (flat,) = Exchange.apply(counts, group, torch.cat([part.flatten() for part in parts]))
    return torch.cat([part.view(shape) for part, shape in zip(flat.split(counts[1]), shapes)], dim=dim)


# --- some tokens of all heads


def with_all_keys(mix: Mix, tensors: tuple[Tensor, ...], slices: Slices) -> Tensor:
    """Run a mixer on this rank's tokens, with an attention to the keys and values of all ranks, which are gathered.

    Unfit if it does not call attention once, or with more than causality. Source: Grattafiori et al. 2024, "The Llama 3 Herd
    of Models", section 3.3.2.
    """
    start, stop = slices.span
    takes_positions = "positions" in inspect.signature(mix).parameters
    positions = {"positions": torch.arange(start, stop, device=tensors[0].device)} if takes_positions else {}
    with _Attention(slices) as attention:
        mixed = mix(*tensors, **positions)
    if attention.num_calls != 1:
        what = f"a mixer calls scaled_dot_product_attention {attention.num_calls} times"
        raise Unfit(f"parallel.attention: ring, but {what}; {ONE_CALL}")
    return mixed


class _Attention(TorchFunctionMode):
    """A mode in which scaled_dot_product_attention takes this rank's queries, keys and values, and reads those of all ranks."""

    def __init__(self, slices: Slices) -> None:
        super().__init__()
        self._slices, self.num_calls = slices, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.num_calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **how: Any,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None or dropout_p:
            what = "a mask" if attn_mask is not None else "dropout"
            raise Unfit(f"parallel.attention: ring, but a mixer's scaled_dot_product_attention has {what} (ulysses)")
        slices = self._slices
        keys, values = (
            gather_rows(t.movedim(2, 0), group=slices.group, counts=slices.counts).movedim(0, 2) for t in (key, value)
        )
        num_keys = slices.span[1] if is_causal else keys.shape[2]
        keys, values = keys[:, :, :num_keys], values[:, :, :num_keys]
        if not query.shape[2]:  # a rank without tokens takes part in the backward pass of the others
            return (query @ keys[:, :1].mT) @ values[:, :1]
        mask = causal_lower_right(query.shape[2], num_keys) if is_causal else None
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, **how)
