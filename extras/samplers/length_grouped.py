"""Length-grouped: each sample once in an epoch, with samples of similar length together, so that there is little padding."""

from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from framework.randomness import key, keys, random_bits
from framework.samplers.values import values_of


class LengthGrouped:
    """The sampler. `lengths` is a `.npy` file or the name of a value of the samples.

    Samples are sorted within random groups of `group_size`. Then the blocks of `batch_size` are put into a random order.

    Source: Hugging Face's `group_by_length`, after fairseq's batches by size.
    """

    def __init__(self, *, lengths: str, batch_size: Annotated[int, Ge(1)], group_size: int = 4096) -> None:
        if batch_size > group_size:
            raise ValueError(f"sampler.batch_size={batch_size}: is out of range (at most sampler.group_size={group_size})")
        self.lengths, self.batch_size, self.group_size = lengths, batch_size, group_size
        self._values: np.ndarray | None = None

    def epoch(self, epoch: int, *, source: Any, seed: int) -> np.ndarray:
        if self._values is None:
            self._values = values_of(source, self.lengths, key="sampler.lengths")
        shuffled = np.argsort(random_bits(keys(seed, "order", epoch, np.arange(len(source)))), kind="stable")
        groups = [shuffled[start : start + self.group_size] for start in range(0, len(shuffled), self.group_size)]
        by_length = np.concatenate([group[np.argsort(self._values[group], kind="stable")] for group in groups])
        num_blocks = len(by_length) // self.batch_size
        blocks = by_length[: num_blocks * self.batch_size].reshape(num_blocks, self.batch_size)
        order = np.argsort(random_bits(np.arange(num_blocks) ^ np.int64(key(seed, "blocks", epoch) >> 1)), kind="stable")
        return np.concatenate([blocks[order].reshape(-1), by_length[num_blocks * self.batch_size :]])
