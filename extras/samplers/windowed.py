"""Windowed: an order for streams. Shards in random order; samples are shuffled within a window, so reading is sequential."""

from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from framework.randomness import key, keys, random_bits


class Windowed:
    """The sampler. `window` samples are shuffled together, as in a shuffle buffer of this size. Nothing else is in memory.

    The groups of a source (its shards) get a random order in each epoch; a source without groups is one group.
    """

    def __init__(self, *, window: Annotated[int, Ge(1)] = 10_000) -> None:
        self.window = window

    def epoch(self, epoch: int, *, source: Any, seed: int) -> "_Stream":
        ends = np.asarray(getattr(source, "groups", [len(source)]))
        starts = np.concatenate([[0], ends[:-1]])
        order = np.argsort(random_bits(keys(seed, "shards", epoch, np.arange(len(ends)))), kind="stable")
        return _Stream(starts[order], np.cumsum((ends - starts)[order]), window=self.window, seed=key(seed, "window", epoch))


class _Stream:
    """An epoch's numbers, computed for each slice: the groups one after the other, shuffled within windows."""

    def __init__(self, starts: np.ndarray, ends: np.ndarray, *, window: int, seed: int) -> None:
        """`starts` are the first samples of the groups, in the epoch's order; `ends` are the groups' ends in the epoch."""
        self._starts, self._ends, self._window, self._seed = starts, ends, window, seed
        self._number, self._shuffled = -1, np.empty(0, dtype=np.int64)  # the latest window

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop, _ = places.indices(len(self))
        parts = []
        while start < stop:
            number, offset = divmod(start, self._window)
            part = self._of_window(number)[offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _of_window(self, number: int) -> np.ndarray:
        if number != self._number:
            places = np.arange(number * self._window, min((number + 1) * self._window, len(self)))
            drawn = random_bits(keys(self._seed, "shuffle", number, places))
            places = places[np.argsort(drawn, kind="stable")]
            groups = np.searchsorted(self._ends, places, side="right")
            before = np.concatenate([[0], self._ends[:-1]])
            self._number, self._shuffled = number, self._starts[groups] + places - before[groups]
        return self._shuffled
