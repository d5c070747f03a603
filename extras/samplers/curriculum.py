"""Curriculum: easy samples first. An epoch draws, with replacement, from the easiest share of the data, which grows."""

import math
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le

from framework.randomness import keys, random_uniform
from framework.samplers.values import values_of


class Curriculum:
    """The sampler. `difficulty` is a `.npy` file or the name of a value of the samples.

    The share starts at `start`, and is 1 after `epochs` epochs. From then on, all samples are equally likely.

    Source: Platanios et al. 2019, "Competence-based curriculum learning", equation 7 (the square root of time).
    """

    def __init__(
        self, *, difficulty: str, start: Annotated[float, Gt(0), Le(1)] = 0.1, epochs: Annotated[int, Ge(1)] = 5
    ) -> None:
        self.difficulty, self.start, self.epochs = difficulty, start, epochs
        self._easiest_first: np.ndarray | None = None

    def epoch(self, epoch: int, *, source: Any, seed: int) -> np.ndarray:
        if self._easiest_first is None:
            values = values_of(source, self.difficulty, key="sampler.difficulty")
            self._easiest_first = np.argsort(values, kind="stable")
        size = len(source)
        places = np.arange(size)
        time = (epoch + places / size) / self.epochs
        share = np.sqrt(np.minimum(1.0, time * (1 - self.start**2) + self.start**2))
        highest = np.maximum(1, np.ceil(share * size - math.ulp(size)))
        drawn = (random_uniform(keys(seed, "curriculum", epoch, places)) * highest).astype(np.int64)
        return self._easiest_first[drawn]
