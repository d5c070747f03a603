"""Mixture: sources that were put together (torch.utils.data.ConcatDataset), each with its share of every epoch."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from framework.randomness import keys, random_bits


class Mixture:
    """`weights`: the share of each source, in their order. `num_samples`: of an epoch; None: as many as all sources have.

    A source is walked through in an order of its own, a new one for each pass, and goes on in the next epoch where it stopped.
    """

    def __init__(self, *, weights: Sequence[float], num_samples: int | None = None) -> None:
        if not weights or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(f"sampler.weights={list(weights)}: are not negative, and not all zero")
        self.weights, self.num_samples = weights, num_samples

    def epoch(self, epoch: int, *, source: Any, seed: int) -> np.ndarray:
        ends = np.asarray(getattr(source, "groups", [len(source)]))
        if len(ends) != len(self.weights):
            raise ValueError(f"sampler.weights={list(self.weights)}: there are {len(ends)} sources (a weight for each)")
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
    """Return `count` numbers from place `first` on of endless passes through `range(length)`, each in a random order."""
    numbers = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        number, offset = divmod(first + done, length)
        order = np.argsort(random_bits(keys(seed, name, number, np.arange(length))), kind="stable")
        part = order[offset : offset + count - done]
        numbers[done : done + len(part)] = part
        done += len(part)
    return numbers
