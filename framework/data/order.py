"""The samples of step t, and the samples of each rank: pure functions of the seed and of `samples_seen`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from framework.randomness import key, random_bits
from framework.runtime.exits import RunEnded, Unfit, error_text, place_of

_MOST_KEPT = 1 << 20  # samples: a permutation of this size is drawn in 60 ms, and takes 8 MiB


class Part(NamedTuple):
    """Consecutive samples of the global batch, range(start, stop), that go through the model at once."""

    number: int  # among the global batch's micro-batches
    start: int
    stop: int
    is_padding: bool = False


@dataclass(kw_only=True, eq=False)
class Order:
    """The order of samples: `draw(epoch)`, or a permutation, cut into global batches; an epoch's last batch may be short."""

    num_samples: int
    global_batch_size: int
    seed: int
    drop_last: bool
    limit: int | None = None  # batches of an epoch
    sample_tokens: int | None = None  # in each sample, if it is known
    in_order: bool = False  # the samples of a stream: their numbers count on over all epochs
    draw: Callable[[int], Any] | None = None  # a pure function; all epochs must have the same length
    grow: Callable[[int], int] | None = None  # a pure function of `samples_seen`: a batch's size, at most `global_batch_size`

    def __post_init__(self) -> None:
        self._drawn: int | None = None  # the number of samples of each epoch
        self._drawn = drawn = self.num_samples if self.draw is None else len(self.numbers(0))
        self.epoch_size = drawn - (drawn % self.global_batch_size if self.drop_last else 0)
        if self.epoch_size == 0:
            raise ValueError(f"drop_last=true leaves no batch of {drawn} samples in batches of "
                             f"{self.global_batch_size}; lower global_batch_size or set drop_last=false")  # fmt: skip
        if self.limit is not None:
            self.epoch_size = min(self.epoch_size, self.limit * self.global_batch_size)
        self._epoch = -1
        self._numbers: np.ndarray | Permutation | range = range(0)
        self._epochs, self._counted = list[int](), 0  # the epoch of each step, and the samples in these steps, if batches grow

    def steps_in(self, num_epochs: int) -> int:
        """Return the number of steps in the first epochs."""
        if self.grow is None:
            return num_epochs * -(-self.epoch_size // self.global_batch_size)
        samples_seen, steps = 0, 0
        while samples_seen < num_epochs * self.epoch_size:
            samples_seen += self.size(samples_seen)
            steps += 1
        return steps

    def epochs_before(self, step: int) -> int:
        """Return the number of epochs that have ended before a step, counted from 0."""
        if self.grow is None:
            return step // self.steps_in(1)
        while len(self._epochs) <= step:
            self._epochs.append(self._counted // self.epoch_size)
            self._counted += self.size(self._counted)
        return self._epochs[step]

    def first(self, num_batches: int) -> np.ndarray:
        """Return the numbers of the samples in the first batches, at most one epoch."""
        return np.asarray(self._permuted(0)[: num_batches * self.global_batch_size])

    def size(self, samples_seen: int) -> int:
        """Return the number of samples in the global batch after `samples_seen` samples."""
        size = self.global_batch_size
        if self.grow is not None:
            size = max(1, min(size, self.grow(samples_seen)))
        return min(size, self.epoch_size - samples_seen % self.epoch_size)

    def batch(self, samples_seen: int) -> tuple[int, np.ndarray]:
        """Return the epoch and the samples' numbers, shape (n,), of the global batch after `samples_seen` samples."""
        epoch, offset = divmod(samples_seen, self.epoch_size)
        if epoch != self._epoch:
            self._epoch, self._numbers = epoch, self.numbers(epoch)
        return epoch, np.asarray(self._numbers[offset : offset + self.size(samples_seen)])

    def numbers(self, epoch: int) -> "np.ndarray | Permutation | range":
        """Return the numbers of an epoch's samples. Raise Unfit if a sampler's numbers are not those of samples."""
        if self.draw is None:
            return self._permuted(epoch)
        try:
            drawn = np.asarray(self.draw(epoch))
        except Exception as error:
            if self._drawn is None or isinstance(error, RunEnded):
                raise
            raise Unfit(f"sampler: epoch {epoch} fails: {error_text(error)}, at {place_of(error)} (see sampler.*)") from error
        if drawn.ndim != 1 or (drawn.size and drawn.dtype.kind not in "iuf"):
            what = f"epoch {epoch} has {drawn.dtype} of shape {list(drawn.shape)}"
            raise Unfit(f"sampler: {what} (a list or an array of the numbers of samples; np.flatnonzero of a mask)")
        if self._drawn not in (None, len(drawn)):
            what = f"epoch {epoch} has {len(drawn)} samples, and epoch 0 has {self._drawn}"
            raise Unfit(f"sampler: {what} (all epochs must have the same length)")
        with np.errstate(invalid="ignore"):
            whole = drawn.astype(np.int64)
        odd = drawn[(whole != drawn) | (whole < 0) | (whole >= self.num_samples)]
        if odd.size:
            what = f"epoch {epoch} has the sample {odd[0]}, and the samples are 0 to {self.num_samples - 1}"
            raise Unfit(f"sampler: {what} (numbers of samples)")
        return whole

    def draws(self, samples_seen: int) -> np.ndarray:
        """Return numbers that distinguish the batch's draws within their epoch, shape (n,).

        They are the samples' numbers; with a sampler, which may draw a sample several times, their places in the epoch."""
        if self.draw is None:
            return self.batch(samples_seen)[1]
        offset = samples_seen % self.epoch_size
        return np.arange(offset, offset + self.size(samples_seen))

    def _permuted(self, epoch: int) -> "np.ndarray | Permutation | range":
        if self.in_order:
            return range(epoch * self.num_samples, (epoch + 1) * self.num_samples)
        if self.num_samples > _MOST_KEPT:
            return Permutation(self.num_samples, seed=self.seed, epoch=epoch)
        # RandomState, not Generator: its stream never changes (NEP 19), so a run can be resumed with any numpy version
        seed = key(self.seed, "order", epoch)
        return np.random.RandomState([seed >> 32, seed & 0xFFFFFFFF]).permutation(self.num_samples)


def parts(num_samples: int, *, micro_batch_size: int | None, dp_rank: int, dp_size: int) -> list[Part]:
    """Cut a global batch into micro-batches and return the micro-batches of `dp_rank`.

    With `micro_batch_size`, each rank takes contiguous whole micro-batches, which do not depend on `dp_size`. Without it, each
    rank takes one contiguous slice of samples. Counts differ by at most one; low ranks have more, so rank 0 always runs
    micro-batch 0. Every rank gets the same NUMBER of parts, because each part may run collectives: a missing part is padding, a
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


# --- a permutation that is not kept in memory


_NUM_ROUNDS = 8
_BLOCK = 8192  # this many numbers are computed at once; for one batch, most of the time would be overhead


class Permutation:
    """A permutation of range(size), one for each seed and epoch: a Feistel network over Z_a x Z_b (Black and Rogaway 2002).

    Each round adds a keyed hash of one half of a number to the other half, modulo a or b. This can be inverted, so it is a
    bijection of range(a * b), with a * b only a little larger than `size`. A result outside of range(size) is mapped again
    until it is inside.
    """

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        self._size = size
        self._high = math.isqrt(size - 1) + 1
        self._low = -(-size // self._high)
        self._keys = [np.uint64(key(seed, "order", epoch, number)) for number in range(_NUM_ROUNDS)]
        self._start, self._block = 0, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, places: slice, /) -> np.ndarray:
        """Return the numbers at consecutive places, int64."""
        start, stop, _ = places.indices(self._size)
        if not self._start <= start <= stop <= self._start + len(self._block):
            self._start = start
            self._block = self._at(np.arange(start, min(self._size, max(stop, start + _BLOCK)), dtype=np.uint64))
        return self._block[start - self._start : stop - self._start]

    def _at(self, places: np.ndarray) -> np.ndarray:
        numbers = self._once(places)
        while (outside := np.flatnonzero(numbers >= self._size)).size:
            numbers[outside] = self._once(numbers[outside])
        return numbers.astype(np.int64)

    def _once(self, numbers: np.ndarray) -> np.ndarray:
        sizes, halves = (np.uint64(self._high), np.uint64(self._low)), [*np.divmod(numbers, np.uint64(self._low))]
        for number, salt in enumerate(self._keys):
            mine = number % 2
            halves[mine] = (halves[mine] + random_bits(halves[1 - mine] ^ salt) % sizes[mine]) % sizes[mine]
        return halves[0] * sizes[1] + halves[1]
