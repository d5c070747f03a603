"""Random keys: every random draw of a run is a pure function of the run's seed and of what it is for."""

import hashlib

import numpy as np

from framework.splitmix import random_bits


def key(seed: int, *parts: int | str) -> int:
    """Return a 63-bit integer that depends on the seed and on every part, and on nothing else."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keys(seed: int, purpose: str, epoch: int, samples: np.ndarray) -> np.ndarray:
    """Return one uint64 key for each sample, shape (B,): `key` a batch at a time."""
    return random_bits(samples.astype(np.uint64) ^ np.uint64(key(seed, purpose, epoch)))
