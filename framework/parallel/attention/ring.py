"""Ring attention: queries stay on their rank; keys and values go around the ring, and their gradients come back.

Shapes: B samples, N heads, T this rank's tokens, E dim of a head.
Source: Liu et al. 2023, "Ring attention with blockwise transformers for near-infinite context". The early and the late run
of tokens on each rank, for causal attention, are from Zhu 2024, zigzag (ring-flash-attention).
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from framework.parallel.attention import blocks
from framework.parallel.attention.cut import Cut
from framework.runtime.exits import Unfit

ONE_CALL = "its forward must call scaled_dot_product_attention once, and nothing else in it may combine tokens"
Attend = Callable[..., Tensor]  # replaces scaled_dot_product_attention


def round_ring(mix: Callable[..., Tensor], *, cut: Cut, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Wrap a mixer of (B, N, T, E) tensors so that it runs on this rank's tokens, and its attention reads all tokens."""
    around = Ring(cut=cut, group=group)

    def run(*tensors: Tensor) -> Tensor:
        return with_attention(mix, partial(_attend, around), tensors, positions=cut.positions)

    return run


def with_attention(mix: Callable[..., Tensor], attend: Attend, tensors: Sequence[Tensor], *, positions: Tensor) -> Tensor:
    """Run a mixer on tokens at these positions, (T,), with another attention. Unfit if it does not call attention once."""
    takes_positions = "positions" in inspect.signature(mix).parameters
    with Replaced(attend) as replaced:
        mixed = mix(*tensors, **({"positions": positions} if takes_positions else {}))
    if replaced.num_calls != 1:
        what = f"a mixer calls scaled_dot_product_attention {replaced.num_calls} times"
        raise Unfit(f"parallel.attention: ring, but {what}; {ONE_CALL}")
    return mixed


class Replaced(TorchFunctionMode):
    """A mode in which another function replaces scaled_dot_product_attention."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend
        self.num_calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.num_calls += 1
        return self._attend(*args, **(kwargs or {}))


def require_plain(*, attn_mask: Tensor | None, dropout_p: float) -> None:
    """Raise Unfit for attention that depends on how the tokens are cut."""
    if attn_mask is not None:
        raise Unfit("parallel.attention: ring, but a mixer's scaled_dot_product_attention has a mask; it can be causal, or not")
    if dropout_p:
        raise Unfit("parallel.attention: ring, but a mixer's scaled_dot_product_attention has dropout; set it to 0")


def _attend(
    ring: "Ring", query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute scaled_dot_product_attention in the ring; the arguments are the same. Collective over the ring's group."""
    require_plain(attn_mask=attn_mask, dropout_p=dropout_p)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    with torch.autocast(kind, enabled=False):  # the scores are summed in float32
        return _RingAttention.apply(query, key, value, ring, scale, is_causal)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ranks of a group; each rank passes to the next rank what it has received from the rank before it."""

    cut: Cut
    group: dist.ProcessGroup

    def round(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the number and tensors (B, N, T, E) of each rank, this rank's first, while the next tensors are being sent."""
        size, rank = self.cut.size, self.cut.rank
        held = [tensor.contiguous() for tensor in tensors]
        for hop in range(size):
            source = (rank - hop) % size
            passed = self.passed(held, source=(source - 1) % size) if hop < size - 1 else None
            yield source, held
            if passed is not None:
                held = passed()

    def passed(self, tensors: Sequence[Tensor], *, source: int) -> Callable[[], list[Tensor]]:
        """Start to pass tensors (B, N, T, E) on; return a function that waits for the tensors of rank `source`."""
        if self.cut.size == 1:
            return lambda: list(tensors)
        shapes = [(*tensor.shape[:2], self.cut.counts[source], tensor.shape[3]) for tensor in tensors]
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        incoming = flat.new_empty(sum(sizes))
        to, since = (dist.get_global_rank(self.group, (self.cut.rank + by) % self.cut.size) for by in (1, -1))
        # a rank without tokens sends nothing, and the other ranks know this
        ways = (dist.isend, flat, to), (dist.irecv, incoming, since)
        operations = [dist.P2POp(act, tensor, peer, self.group) for act, tensor, peer in ways if tensor.numel()]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            _ = flat  # keep it alive until it is sent
            return [part.view(shape) for part, shape in zip(incoming.split(sizes), shapes)]

        return wait

    def meeting(self, source: int, *, is_causal: bool) -> tuple[slice, slice]:
        """Return which of this rank's queries read which of the source's keys; all of these queries read all of these keys.

        Causal: all queries read the early run of an earlier rank, none its late run; the late run reads both of a later rank.
        """
        if not is_causal or source == self.cut.rank:
            return slice(None), slice(None)
        early = self.cut.sizes[self.cut.rank], self.cut.sizes[source]  # a rank's early run has the rank's number
        return (slice(None), slice(early[1])) if source < self.cut.rank else (slice(early[0], None), slice(None))


class _RingAttention(torch.autograd.Function):
    """Attention to all ranks' tokens: keys and values go around once forward, and once backward with their gradients."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, ring: Ring, scale: float, is_causal: bool) -> Tensor:  # type: ignore[no-untyped-def,override]  # torch's own signature
        found = blocks.Read.nothing(q, v)
        for source, (keys, values) in ring.round((k, v)):
            rows, columns = ring.meeting(source, is_causal=is_causal)
            own, keys, values = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
            if own.numel() and keys.numel():
                more = blocks.attend(own, keys, values, scale=scale, is_causal=is_causal and source == ring.cut.rank)
                found.merge(more, rows=rows)
        read = found.values.to(q.dtype)
        ctx.save_for_backward(q, k, v, read, found.weights)
        ctx.how = ring, scale, is_causal
        return read

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def,override]
        q, k, v, read, weights = ctx.saved_tensors
        ring, scale, is_causal = ctx.how
        of_values = gradient.to(weights.dtype)
        dots = (of_values * read).sum(dim=-1)
        to_q = torch.zeros_like(q, dtype=weights.dtype)
        size, rank = ring.cut.size, ring.cut.rank
        to_others = [torch.zeros_like(tensor, dtype=weights.dtype) for tensor in (k, v)]
        waiting: Callable[[], list[Tensor]] = partial(list, to_others)
        for source, (keys, values) in ring.round((k, v)):
            rows, columns = ring.meeting(source, is_causal=is_causal)
            own, keys, values = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
            more: list[Tensor] = []
            if own.numel() and keys.numel():
                to_own, *more = blocks.gradients(
                    own, keys, values, weights=weights[:, :, rows], of_values=of_values[:, :, rows], dots=dots[:, :, rows],
                    scale=scale, is_causal=is_causal and source == rank,
                )  # fmt: skip
                to_q[:, :, rows] += to_own
            to_others = waiting()  # the source's gradients, from the ranks that it has visited before
            for total, part in zip(to_others, more):
                total[:, :, columns] += part
            waiting = ring.passed(to_others, source=(source - 1) % size)
        to_k, to_v = waiting()
        return to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype), None, None, None
