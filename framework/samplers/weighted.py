"""Weighted: samples are drawn with replacement, each with a probability proportional to its weight."""

from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from framework.randomness import keys, random_uniform
from framework.samplers.values import values_of


class Weighted:
    """The sampler. `weights` is a `.npy` file or a value of the samples; `balanced`: it holds classes, all equally likely."""

    def __init__(self, *, weights: str, balanced: bool = False, num_samples: Annotated[int, Ge(1)] | None = None) -> None:
        self.weights, self.balanced, self.num_samples = weights, balanced, num_samples
        self._bounds: np.ndarray | None = None

    def epoch(self, epoch: int, *, source: Any, seed: int) -> np.ndarray:
        if self._bounds is None:
            self._bounds = self._cumulated(source)
        places = np.arange(len(source) if self.num_samples is None else self.num_samples)
        drawn = random_uniform(keys(seed, "weighted", epoch, places)) * self._bounds[-1]
        return np.searchsorted(self._bounds, drawn, side="right").clip(max=len(source) - 1)

    def _cumulated(self, source: Any) -> np.ndarray:
        values = values_of(source, self.weights, key="sampler.weights")
        if self.balanced:
            _, classes, counts = np.unique(values, return_inverse=True, return_counts=True)
            values = 1 / counts[classes]
        if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
            raise ValueError(f"sampler.weights={self.weights}: weights must not be negative, and not all zero")
        return np.cumsum(values.astype(np.float64))
