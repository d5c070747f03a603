"""Attention of some queries to some keys, with results that can be merged: exact, and never a whole matrix of scores.

Shapes: B samples, N heads, T queries, S keys, E dim of a head. Computed in float32, or in float64 if the inputs are float64.
Keys and values may have fewer heads than queries; groups of query heads then share them.
Source: Dao 2023, "FlashAttention-2", Algorithms 1 and 2.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_NUM_SCORES = 1 << 22  # scores in memory at a time, of all samples and heads


class Read(NamedTuple):
    """The result of attention: a mean of values (B, N, T, E), and the logarithm of the sum of their weights (B, N, T)."""

    values: Tensor
    weights: Tensor

    @classmethod
    def nothing(cls, q: Tensor, v: Tensor) -> "Read":
        dtype = torch.promote_types(q.dtype, torch.float32)
        weights = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
        return cls(torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device), weights)

    def merge(self, more: "Read", *, rows: slice) -> None:
        """Add the result `more` to the queries of these rows, in place."""
        values, weights = self.values[:, :, rows], self.weights[:, :, rows]
        merged = torch.logaddexp(weights, more.weights)
        values.mul_((weights - merged).exp().unsqueeze(-1)).add_(more.values * (more.weights - merged).exp().unsqueeze(-1))
        weights.copy_(merged)


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool) -> Read:
    """Return the result of attention to some keys and values (at least one); causal: the n-th query reads the first n keys."""
    found = Read.nothing(q, v)
    k, v = (_for_heads_of(q, tensor).to(found.values.dtype) for tensor in (k, v))
    for rows, keys, scores in _scores(q, k, scale=scale, is_causal=is_causal):
        weights = scores.logsumexp(dim=-1)
        found.weights[:, :, rows] = weights
        found.values[:, :, rows] = (scores - weights.unsqueeze(-1)).exp_() @ v[:, :, keys]
    return found


def gradients(
    q: Tensor, k: Tensor, v: Tensor, *, weights: Tensor, of_values: Tensor, dots: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what these keys and values add to the gradients of q, k and v.

    `weights` belong to all keys that the queries have read. `of_values` is the gradient of the values read. `dots` are the
    dot products of the two, (B, N, T).
    """
    shared = k.shape[1]
    k, v = (_for_heads_of(q, tensor).to(of_values.dtype) for tensor in (k, v))
    to_q, to_k, to_v = (torch.zeros_like(tensor, dtype=of_values.dtype) for tensor in (q, k, v))
    for rows, keys, scores in _scores(q, k, scale=scale, is_causal=is_causal):
        shares = (scores - weights[:, :, rows].unsqueeze(-1)).exp_()
        of_rows = of_values[:, :, rows]
        to_v[:, :, keys] += shares.mT @ of_rows
        of_scores = shares * (of_rows @ v[:, :, keys].mT - dots[:, :, rows].unsqueeze(-1)) * scale
        to_q[:, :, rows] = of_scores @ k[:, :, keys]
        to_k[:, :, keys] += of_scores.mT @ q[:, :, rows].to(k.dtype)
    if shared != q.shape[1]:
        to_k, to_v = (tensor.unflatten(1, (shared, -1)).sum(dim=2) for tensor in (to_k, to_v))
    return to_q, to_k, to_v


def _for_heads_of(q: Tensor, tensor: Tensor) -> Tensor:
    return tensor if tensor.shape[1] == q.shape[1] else tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, *, scale: float, is_causal: bool) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield rows of queries, the keys that they read, and their scores: some rows at a time."""
    num_samples, num_heads, num_queries, _ = q.shape
    num_keys = k.shape[2]
    step = max(1, _NUM_SCORES // max(1, num_samples * num_heads * num_keys))
    for start in range(0, num_queries, step):
        rows = slice(start, min(start + step, num_queries))
        keys = slice(0, rows.stop if is_causal else num_keys)
        scores = q[:, :, rows].to(k.dtype) @ k[:, :, keys].mT * scale
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
            scores.masked_fill_(later, -torch.inf)
        yield rows, keys, scores
