"""Scenes: real digits at random places on a canvas. The class of a pixel is its digit, or background."""

import numpy as np

from framework.data.digits import Digits
from framework.data.source import Arrays, Split

SPLITS = ("train", "val", "test")
BACKGROUND = 10  # the classes 0 to 9 are the digits
IGNORED = -100  # the target of a pixel that does not count
SIZE = 8  # a digit's side in pixels
INK = 128  # grey values from 128 on belong to the digit; values from 1 to 127 are its border, which does not count


class Scenes:
    """Images uint8 (1, H, H) and targets int64 (H, H), with H = image_size. The splits share no digit.

    Scene n of a split is drawn from its own generator. The seed is the split and n, so any process makes the same scene.
    """

    task = "segmentation"

    def __init__(
        self,
        *,
        num_train: int = 1000,
        num_val: int = 200,
        num_test: int = 200,
        image_size: int = 24,
        num_digits: int = 4,
        num_workers: int = 0,
    ) -> None:
        if image_size < SIZE:
            raise ValueError(f"dataset.image_size={image_size}: is out of range (at least {SIZE}, the size of a digit)")
        self.sizes = {"train": num_train, "val": num_val, "test": num_test}
        self.image_size = image_size
        self.num_digits = num_digits
        self.num_workers = num_workers
        self.info = {"in_channels": 1, "image_size": image_size, "num_classes": BACKGROUND + 1}

    def problems(self) -> list[str]:
        return Digits().problems()

    def load(self, split: Split) -> Arrays:
        digits = Digits().load(split)
        scenes = [self._scene(digits, np.random.default_rng([SPLITS.index(split), n])) for n in range(self.sizes[split])]
        return Arrays(np.stack([image for image, _ in scenes]), np.stack([target for _, target in scenes]))

    def _scene(self, digits: Arrays, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the image (1, H, H) and the classes of its pixels (H, H). A later digit covers an earlier digit."""
        image = np.zeros((self.image_size, self.image_size), dtype=np.uint8)
        target = np.full(image.shape, BACKGROUND, dtype=np.int64)
        for number in random.integers(len(digits), size=self.num_digits):
            top, left = random.integers(self.image_size - SIZE + 1, size=2)
            place = np.s_[top : top + SIZE, left : left + SIZE]
            digit, label = digits.inputs[number, 0], digits.targets[number]
            image[place] = digit
            target[place] = np.where(digit >= INK, label, np.where(digit > 0, IGNORED, BACKGROUND))
        return image[None], target

    def transform(self, inputs, targets, *, keys):  # type: ignore[no-untyped-def]  # torch is not imported here
        """Return the images (B, 1, H, H), approximately centred, and the targets (B, H, H) unchanged."""
        return inputs.float() / 64 - 0.5, targets
