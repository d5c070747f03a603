"""Synthetic: learnable data of any size, computed on demand, the same for every seed and on every machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from framework.data.source import Arrays, AtLeastOne, Images, Source, Split, Windows, vectorised
from framework.randomness import permutation, random_bits, random_integers, random_uniform

if TYPE_CHECKING:
    from torch import Tensor

MEAN, STD = 0.5, 0.204  # of the average of two uniform draws
TASKS = {"images": "classification", "tokens": "language_modeling", "vectors": "regression"}
SHARED = 2**48  # the first key of values that all samples share; the keys of samples count up from 0


@dataclass(kw_only=True, eq=False)
class Synthetic(Images):
    """Generated samples. A sample depends only on its number; train, val and test have consecutive numbers.

    - images: the average of the class's image and of noise; the target is the class.
    - tokens: a walk around a fixed circle of all tokens: in seven of eight cases one step forward, else a jump to any token.
    - vectors: `num_features` inputs in [-1, 1) and `num_outputs` float targets, tanh of a fixed linear map of the inputs
      (for task=regression). For a model, a vector is an image of one pixel, and its outputs are the "classes".
    """

    kind: Literal["images", "tokens", "vectors"] = "images"
    num_train: AtLeastOne = 1024
    num_val: AtLeastOne = 256
    num_test: AtLeastOne = 256
    in_channels: AtLeastOne = 3
    image_size: AtLeastOne = 32
    num_classes: AtLeastOne = 10
    vocab_size: AtLeastOne = 64
    seq_len: AtLeastOne = 64
    num_features: AtLeastOne = 16
    num_outputs: AtLeastOne = 1

    def __post_init__(self) -> None:
        if self.augment and self.kind != "images":
            raise ValueError(f"dataset.augment=true: there is no augmentation of {self.kind} (dataset.kind=images has one)")
        self.task = TASKS[self.kind]
        self.mean, self.std = [MEAN] * self.in_channels, [STD] * self.in_channels
        self.padding = self.image_size // 8

    @property
    def info(self) -> Mapping[str, int]:
        if self.kind == "tokens":
            return {"vocab_size": self.vocab_size, "seq_len": self.seq_len}
        if self.kind == "vectors":
            return {"in_channels": self.num_features, "image_size": 1, "num_classes": self.num_outputs}
        return {"in_channels": self.in_channels, "image_size": self.image_size, "num_classes": self.num_classes}

    def problems(self) -> list[str]:
        return []

    def load(self, split: Split) -> Source:
        sizes = {"train": self.num_train, "val": self.num_val, "test": self.num_test}
        first = {"train": 0, "val": self.num_train, "test": self.num_train + self.num_val}[split]
        samples = np.arange(first, first + sizes[split])
        if self.kind == "tokens":
            return self._tokens(samples)
        return self._vectors(samples) if self.kind == "vectors" else self._images(samples)

    @vectorised
    def transform(self, inputs: "Tensor", targets: "Tensor", *, keys: np.ndarray | None) -> tuple["Tensor", "Tensor"]:
        if self.kind == "tokens":
            return inputs.long(), targets.long()
        return (inputs, targets) if self.kind == "vectors" else super().transform(inputs, targets, keys=keys)

    def _images(self, samples: np.ndarray) -> Arrays:
        shape = (self.in_channels, self.image_size, self.image_size)
        classes = random_integers(samples, high=self.num_classes)
        pictures = _random_bytes(SHARED + np.arange(self.num_classes), shape=shape)
        return Arrays(pictures[classes] // 2 + _random_bytes(samples, shape=shape) // 2, classes)

    def _tokens(self, samples: np.ndarray) -> Windows:
        # one walk through all samples: only the first token of a split is random without a predecessor
        keys = np.arange(samples[0] * self.seq_len, (samples[-1] + 1) * self.seq_len + 1)
        jumps = random_integers(keys, high=8) == 0
        steps = np.where(jumps, random_integers(keys, high=self.vocab_size, draw=1), 1)
        circle = permutation(self.vocab_size)
        return Windows(circle[np.cumsum(steps) % self.vocab_size], self.seq_len)

    def _vectors(self, samples: np.ndarray) -> Arrays:
        inputs = _random_table(samples, width=self.num_features)
        weights = _random_table(SHARED + np.arange(self.num_features), width=self.num_outputs)
        return Arrays(inputs.astype(np.float32), np.tanh(inputs @ weights).astype(np.float32))


def _random_bytes(keys: np.ndarray, *, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    words = [random_bits(keys, draw=draw) for draw in range(1, 1 + -(-size // 8))]  # of eight bytes
    return np.stack(words, axis=1).view(np.uint8)[:, :size].reshape(-1, *shape)


def _random_table(keys: np.ndarray, *, width: int) -> np.ndarray:
    """Return `width` numbers in [-1, 1) for each key, float64."""
    return np.stack([2 * random_uniform(keys, draw=draw) - 1 for draw in range(width)], axis=1)
