"""A permutation of any number of samples that is computed on demand and not kept in memory."""

import math

import numpy as np

from framework.randomness import key, random_bits

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
