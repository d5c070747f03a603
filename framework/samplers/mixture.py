"""Mixture: several concatenated sources (torch.utils.data.ConcatDataset), each with its share of every epoch."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from framework.randomness import keys, random_bits


class Mixture:
    """The sampler. `weights` are the shares of the sources, in order. `num_samples` of an epoch; None: those of all sources.

    Each source has its own order, a new order for each pass, and the next epoch continues where the last one stopped.
    """

    def __init__(self, *, weights: Sequence[float], num_samples: int | None = None) -> None:
        if not weights or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(f"sampler.weights={list(weights)}: must not be negative, and not all zero")
        self.weights, self.num_samples = weights, num_samples

    def epoch(self, epoch: int, *, source: Any, seed: int) -> np.ndarray:
        ends = np.asarray(getattr(source, "groups", [len(source)]))
        if len(ends) != len(self.weights):
            raise ValueError(f"sampler.weights={list(self.weights)}: there are {len(ends)} sources (a weight for each)")
        for number, (weight, length) in enumerate(zip(self.weights, np.diff(ends, prepend=0))):
            if weight > 0 and length == 0:
                raise ValueError(f"sampler.weights={list(self.weights)}: source {number} has no samples (a weight of 0)")
        size = len(source) if self.num_samples is None else self.num_samples
        bounds = np.round(np.cumsum(self.weights) / sum(self.weights) * size).astype(np.int64)
        which = np.repeat(np.arange(len(ends)), np.diff(bounds, prepend=0))
        which = which[np.argsort(random_bits(keys(seed, "mixture", epoch, np.arange(size))), kind="stable")]
        numbers = np.empty(size, dtype=np.int64)
        for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends)):
            places = np.flatnonzero(which == number)
            numbers[places] = start + _walk(
                int(end - start), epoch * len(places), len(places), seed=seed, name=f"source {number}"
            )
        return numbers


def _walk(length: int, first: int, count: int, *, seed: int, name: str) -> np.ndarray:
    """Return `count` numbers, starting at place `first`, of endless passes through `range(length)`, each in random order."""
    passes = range(first // length, -(-(first + count) // length)) if count else ()  # a source without a share may be empty
    orders = [np.argsort(random_bits(keys(seed, name, number, np.arange(length))), kind="stable") for number in passes]
    return np.concatenate([np.empty(0, dtype=np.int64), *orders])[first % max(1, length) :][:count]
