"""Which samples make step t, and which rank runs which samples: pure functions of the seed and of `samples_seen`."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from framework.randomness import key


class Part(NamedTuple):
    """Consecutive samples of the global batch, range(start, stop), that go through the model at once."""

    number: int  # among the global batch's micro-batches
    start: int
    stop: int
    is_padding: bool = False


@dataclass(kw_only=True, eq=False)
class Order:
    """The order of samples: a permutation of each epoch, cut into global batches; the last one of an epoch is short."""

    num_samples: int
    global_batch_size: int
    seed: int
    drop_last: bool

    def __post_init__(self) -> None:
        self.epoch_size = self.num_samples - (self.num_samples % self.global_batch_size if self.drop_last else 0)
        if self.epoch_size == 0:
            raise ValueError(f"drop_last=true leaves nothing of {self.num_samples} samples in batches of "
                             f"{self.global_batch_size}; lower global_batch_size or set drop_last=false")  # fmt: skip
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.epoch_size // self.global_batch_size)

    def size(self, samples_seen: int) -> int:
        """Return the number of samples in the global batch after `samples_seen` samples."""
        return min(self.global_batch_size, self.epoch_size - samples_seen % self.epoch_size)

    def batch(self, samples_seen: int) -> tuple[int, np.ndarray]:
        """Return the epoch and the samples' numbers, shape (n,), of the global batch after `samples_seen` samples."""
        epoch, offset = divmod(samples_seen, self.epoch_size)
        if epoch != self._epoch:
            # RandomState, not Generator: its stream never changes (NEP 19), so a run can be resumed under any numpy
            seed = key(self.seed, "order", epoch)
            self._permutation = np.random.RandomState([seed >> 32, seed & 0xFFFFFFFF]).permutation(self.num_samples)
            self._epoch = epoch
        return epoch, self._permutation[offset : offset + self.size(samples_seen)]


def parts(num_samples: int, *, micro_batch_size: int | None, dp_rank: int, dp_size: int) -> list[Part]:
    """Cut a global batch into micro-batches and return those of `dp_rank`.

    With `micro_batch_size`, each rank takes contiguous whole micro-batches, which do not depend on `dp_size`; without it,
    one contiguous slice of samples. Counts differ by one at most; low ranks have more, so rank 0 always runs micro-batch
    0. Every rank gets the same NUMBER of parts, since each may hold collectives: the missing parts are padding, a
    repetition with weight zero.
    """
    if micro_batch_size is None:
        bounds = [-(-rank * num_samples // dp_size) for rank in range(dp_size + 1)]
        mine = range(dp_rank, dp_rank + 1)
    else:
        bounds = [*range(0, num_samples, micro_batch_size), num_samples]
        count = len(bounds) - 1
        mine = range(-(-dp_rank * count // dp_size), -(-(dp_rank + 1) * count // dp_size))
    real = [Part(number=i, start=bounds[i], stop=bounds[i + 1]) for i in mine if bounds[i] < bounds[i + 1]]
    num_parts = -(-(len(bounds) - 1) // dp_size)
    repeated = real[0] if real else Part(number=0, start=0, stop=bounds[1])
    return real + [repeated._replace(is_padding=True)] * (num_parts - len(real))
