"""Windowed: an order for streams. Shards in random order; samples are shuffled within a window, so reading is sequential."""

from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from framework.randomness import keys, random_bits


class Windowed:
    """The sampler. `window` samples are shuffled together, as in a shuffle buffer of this size.

    The groups of a source (its shards) get a random order in each epoch; a source without groups is one group.
    """

    def __init__(self, *, window: Annotated[int, Ge(1)] = 10_000) -> None:
        self.window = window

    def epoch(self, epoch: int, *, source: Any, seed: int) -> np.ndarray:
        ends = np.asarray(getattr(source, "groups", [len(source)]))
        starts = np.concatenate([[0], ends[:-1]])
        order = np.argsort(random_bits(keys(seed, "shards", epoch, np.arange(len(ends)))), kind="stable")
        numbers = np.concatenate([np.arange(starts[group], ends[group]) for group in order])
        drawn = random_bits(keys(seed, "window", epoch, np.arange(len(numbers))))
        return numbers[np.lexsort([drawn, np.arange(len(numbers)) // self.window])]
