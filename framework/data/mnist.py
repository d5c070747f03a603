"""MNIST: 70,000 handwritten digits of 28 x 28 pixels."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from framework.data import idx
from framework.data.source import Arrays, Split, require_at_least

if TYPE_CHECKING:
    from torch import Tensor

MEAN, STD = (0.1307,), (0.3081,)


class MNIST:
    """The four IDX files in torchvision's place, root/MNIST/raw."""

    task = "classification"
    info: Mapping[str, int] = {"in_channels": 1, "image_size": 28, "num_classes": 10}

    def __init__(
        self,
        *,
        root: str = "data",
        download: bool = False,
        num_val: int = 5000,
        augment: bool = False,
        num_workers: int = 0,
    ):
        require_at_least(1, num_val=num_val)
        require_at_least(0, num_workers=num_workers)
        self.root = root
        self.download = download
        self.num_val = num_val
        self.augment = augment
        self.num_workers = num_workers

    @property
    def folders(self) -> list[Path]:
        """Where the files are looked for."""
        return [Path(self.root) / "MNIST" / "raw"]

    def problems(self) -> list[str]:
        if self.download or idx.find_folder(self.folders):
            return []
        return [f"dataset.root: {idx.missing(self.folders)} (dataset.download=true)"]

    def load(self, split: Split) -> Arrays:
        if self.download and not idx.find_folder(self.folders):
            idx.download("MNIST", root=self.root)
        return idx.load_split(self.folders, split, num_val=self.num_val)

    def transform(self, inputs: "Tensor", targets: "Tensor", *, keys: np.ndarray | None) -> tuple["Tensor", "Tensor"]:
        from framework.data.images import prepare

        keys = keys if self.augment else None
        return prepare(inputs, keys=keys, mean=MEAN, std=STD, padding=2, flip=False), targets
