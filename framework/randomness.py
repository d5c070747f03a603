"""Random keys. Every random draw of a run is a pure function of the run's seed and of the purpose of the draw."""

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def key(seed: int, *parts: int | str) -> int:
    """Return a 63-bit integer that depends only on the seed and on every part."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keys(seed: int, purpose: str, epoch: int, samples: np.ndarray) -> np.ndarray:
    """Return one uint64 key per sample, shape (B,). It is a version of `key` for a whole batch."""
    return random_bits(samples.astype(np.uint64) ^ np.uint64(key(seed, purpose, epoch)))


def seed_generators(seed: int, *, devices: "Iterable[torch.device]" = ()) -> None:
    """Seed the generators that functions use: those of Python, numpy and torch, on the CPU and on these devices."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    for generator in _of_torch(*devices) if "torch" in sys.modules else ():  # else nothing here draws from torch
        generator.manual_seed(seed)


def generator_states(*, devices: "Iterable[torch.device]" = ()) -> list[Any]:
    """Return the states of the generators of Python, numpy and torch, on the CPU and on these devices."""
    of_torch = _of_torch(*devices) if "torch" in sys.modules else []
    return [random.getstate(), np.random.get_state(), *(generator.get_state() for generator in of_torch)]


def has_drawn(*own: "torch.Generator") -> bool:
    """Return whether anybody has drawn from Python's, numpy's and torch's generators since `seed_generators`, or from `own`."""
    import torch

    _, (*_, position), gauss = random.getstate()
    of_numpy: Any = np.random.get_state(legacy=False)
    has_gauss = gauss is not None or bool(of_numpy["has_gauss"])
    if has_gauss or not position == of_numpy["state"]["pos"] == 624:  # a Mersenne Twister begins at the end of its numbers
        return True
    return any(
        not torch.equal(one.get_state(), torch.Generator(one.device).manual_seed(one.initial_seed()).get_state())
        for one in (torch.default_generator, *own)
    )


def set_generator_states(states: list[Any], *, devices: "Iterable[torch.device]" = ()) -> None:
    """Restore the generators' states from the result of `generator_states`."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    for generator, state in zip(_of_torch(*devices) if states[2:] else (), states[2:]):
        generator.set_state(state)


@cache
def _of_torch(*devices: "torch.device") -> list[Any]:
    """Return torch's generators."""
    import torch

    on_gpus = [torch.cuda.default_generators[device.index] if device.type == "cuda" else _generator_of_mps()
               for device in devices if device.type in ("cuda", "mps")]  # fmt: skip
    return [torch.default_generator, *on_gpus]


def _generator_of_mps() -> Any:
    import torch

    names = {"manual_seed": "manual_seed", "get_state": "get_rng_state", "set_state": "set_rng_state"}
    return SimpleNamespace(**{name: getattr(torch.mps, theirs) for name, theirs in names.items()})


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators within the context, and restore their states at its end."""
    before = generator_states()
    seed_generators(seed)
    try:
        yield
    finally:
        set_generator_states(before)


_GAMMA = 0x9E3779B97F4A7C15


_BITS_64 = 2**64 - 1


def random_bits(keys: np.ndarray, *, draw: int = 0) -> np.ndarray:
    """Return 64 random bits for each key, as uint64: output number `draw` of splitmix64 with the key as seed."""
    # an array wraps around silently, as needed here; a numpy scalar would warn
    x = np.atleast_1d(keys).astype(np.uint64) + np.uint64(_GAMMA * (draw + 1) & _BITS_64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_integers(keys: np.ndarray, *, high: int, draw: int = 0) -> np.ndarray:
    """Return an int64 from 0 to `high - 1` for each key. The probabilities differ by at most the fraction high / 2**32."""
    upper_half = random_bits(keys, draw=draw) >> np.uint64(32)
    return (upper_half * np.uint64(high) >> np.uint64(32)).astype(np.int64)


def random_uniform(keys: np.ndarray, *, draw: int = 0) -> np.ndarray:
    """Return a number in [0, 1) for each key, as float64."""
    return (random_bits(keys, draw=draw) >> np.uint64(11)) * 2.0**-53


def permutation(length: int) -> np.ndarray:
    """Return a fixed random order of `range(length)`."""
    return np.argsort(random_bits(np.arange(length)), kind="stable")
