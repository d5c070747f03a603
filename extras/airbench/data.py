"""CIFAR-10 with the augmentation of airbench: shifts, alternating flips, and a square that is cut out."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from framework.data import published
from framework.data.source import Arrays, NotNegative, Split, vectorised

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, eq=False)
class CIFAR10(published.CIFAR10):
    """CIFAR-10. With `num_val=0`, the paper's split: all 50,000 images train, and `val` and `test` are both the test set."""

    num_val: NotNegative = 0
    augment: bool = True
    translate: NotNegative = 2  # the largest shift, in pixels
    cutout: NotNegative = 0  # pixels on a side of the square; the paper has 12 for 96 %

    def load(self, split: Split) -> Arrays:
        return super().load("test" if split == "val" and self.num_val == 0 else split)

    @vectorised
    def transform(
        self,
        inputs: "Tensor",
        targets: "Tensor",
        *,
        keys: np.ndarray | None,
        epoch: int = 0,
        sample_keys: np.ndarray | None = None,
    ) -> tuple["Tensor", "Tensor"]:
        if keys is not None and sample_keys is not None:
            from extras.airbench.images import alternating, cut_out, shifted

            inputs = shifted(inputs, keys, mirrored=alternating(sample_keys, epoch=epoch), most=self.translate)
            inputs = cut_out(inputs, keys, size=self.cutout) if self.cutout else inputs
        return super().transform(inputs, targets, keys=None)
