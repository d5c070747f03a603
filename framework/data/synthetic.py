"""Synthetic: learnable data of any size, made up on the spot, the same for every seed and on every machine."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np

from framework.data.source import Arrays, Source, Split, Windows, require_at_least
from framework.randomness import permutation, random_bits, random_integers, random_uniform

if TYPE_CHECKING:
    from torch import Tensor

MEAN, STD = 0.5, 0.204  # of the average of two uniform draws
# Keys apart from those of samples, which count up from 0: what all samples share.
SHARED = 2**48


class Synthetic:
    """A sample depends on its number only; train, val and test are successive numbers.

    - images: the average of a picture of the class and of noise; the target is the class.
    - tokens: a walk around a fixed circle of all tokens, one step ahead seven times of eight, else a jump anywhere.
    - vectors: `num_features` inputs in [-1, 1) and `num_outputs` float targets, tanh of a fixed linear map of them
      (take task=regression). To a model a vector is an image of one pixel, its outputs are the "classes".
    """

    def __init__(
        self,
        *,
        kind: Literal["images", "tokens", "vectors"] = "images",
        num_train: int = 1024,
        num_val: int = 256,
        num_test: int = 256,
        in_channels: int = 3,
        image_size: int = 32,
        num_classes: int = 10,
        vocab_size: int = 64,
        seq_len: int = 64,
        num_features: int = 16,
        num_outputs: int = 1,
        augment: bool = False,
        num_workers: int = 0,
    ):
        require_at_least(1, num_train=num_train, num_val=num_val, num_test=num_test, in_channels=in_channels)
        require_at_least(1, image_size=image_size, num_classes=num_classes, vocab_size=vocab_size, seq_len=seq_len)
        require_at_least(1, num_features=num_features, num_outputs=num_outputs)
        require_at_least(0, num_workers=num_workers)
        if kind not in ("images", "tokens", "vectors"):
            raise ValueError(f"dataset.kind={kind}: must be images, tokens or vectors")
        if augment and kind != "images":
            raise ValueError(f"dataset.augment=true: there is no augmentation of {kind} (dataset.kind=images has one)")
        self.kind = kind
        self.sizes = {"train": num_train, "val": num_val, "test": num_test}
        self.in_channels = in_channels
        self.image_size = image_size
        self.num_classes = num_classes
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.num_features = num_features
        self.num_outputs = num_outputs
        self.augment = augment
        self.num_workers = num_workers

    @property
    def task(self) -> str:
        return {"images": "classification", "tokens": "language_modeling", "vectors": "regression"}[self.kind]

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
        first = {"train": 0, "val": self.sizes["train"], "test": self.sizes["train"] + self.sizes["val"]}[split]
        samples = np.arange(first, first + self.sizes[split])
        if self.kind == "tokens":
            return self._tokens(samples)
        return self._vectors(samples) if self.kind == "vectors" else self._images(samples)

    def transform(self, inputs: "Tensor", targets: "Tensor", *, keys: np.ndarray | None) -> tuple["Tensor", "Tensor"]:
        if self.kind == "tokens":
            return inputs.long(), targets.long()
        if self.kind == "vectors":
            return inputs, targets
        from framework.data.images import prepare

        mean, std = [MEAN] * self.in_channels, [STD] * self.in_channels
        keys = keys if self.augment else None
        return prepare(inputs, keys=keys, mean=mean, std=std, padding=self.image_size // 8, flip=True), targets

    def _images(self, samples: np.ndarray) -> Arrays:
        shape = (self.in_channels, self.image_size, self.image_size)
        classes = random_integers(samples, high=self.num_classes)
        pictures = _random_bytes(SHARED + np.arange(self.num_classes), shape=shape)
        return Arrays(pictures[classes] // 2 + _random_bytes(samples, shape=shape) // 2, classes)

    def _tokens(self, samples: np.ndarray) -> Windows:
        # a walk of all samples in one line: the first token of a split is the one free choice
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
    """Return an array uint8 of this shape for each key."""
    size = int(np.prod(shape))
    words = [random_bits(keys, draw=draw) for draw in range(1, 1 + -(-size // 8))]  # of eight bytes
    return np.stack(words, axis=1).view(np.uint8)[:, :size].reshape(-1, *shape)


def _random_table(keys: np.ndarray, *, width: int) -> np.ndarray:
    """Return `width` numbers in [-1, 1) for each key, float64."""
    return np.stack([2 * random_uniform(keys, draw=draw) - 1 for draw in range(width)], axis=1)
