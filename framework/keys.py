"""Random keys: every random draw of a run is a pure function of the run's seed and of what it is for."""

import hashlib

import numpy as np


def key(seed: int, *parts: int | str) -> int:
    """Return a 63-bit integer that depends on the seed and on every part, and on nothing else."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keys(seed: int, purpose: str, epoch: int, samples: np.ndarray) -> np.ndarray:
    """Return one uint64 key for each sample, shape (B,): `key` a batch at a time.

    The samples are mixed into the epoch's key by splitmix64's finalizer (Steele et al. 2014, "Fast splittable
    pseudorandom number generators").
    """
    with np.errstate(over="ignore"):
        x = np.uint64(key(seed, purpose, epoch)) + samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
