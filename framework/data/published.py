"""Published sets of labelled images, as torchvision reads them: MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100."""

import gzip
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np

from framework.data.source import Arrays, Images, Split, require_at_least
from framework.runtime.exits import error_text

_IDX = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # the package dataset-fashion-mnist


@dataclass(kw_only=True, eq=False)
class _Published(Images):
    """The dataset of torchvision with the name of the class. val is the last `num_val` samples of the training set."""

    info: ClassVar[dict[str, int]]
    folder: ClassVar[str]  # below `root`
    files: ClassVar[tuple[str, ...]]  # in this folder
    remedy = "dataset.download=true"

    root: str = "data"
    download: bool = False
    num_val: int = 5000

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "num_val")

    def problems(self) -> list[str]:
        there = Path(self.root) / self.folder
        missing = [name for name in self.files if not (there / name).is_file()]
        return [] if self.download or not missing else [f"dataset.root: {', '.join(missing)} not in {there} ({self.remedy})"]

    def load(self, split: Split) -> Arrays:
        if problems := self.problems():
            raise ValueError(problems[0])
        made = self._made(self.root, split)
        images, labels = np.asarray(made.data), np.asarray(made.targets, dtype=np.int64)
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        if split == "test":
            return Arrays(np.ascontiguousarray(images), labels)
        if self.num_val >= len(images):
            raise ValueError(f"dataset.num_val={self.num_val}: must be below the {len(images)} images of the training set")
        part = slice(None, -self.num_val) if split == "train" else slice(-self.num_val, None)
        return Arrays(np.ascontiguousarray(images[part]), labels[part])

    def _made(self, root: str, split: Split) -> Any:
        import torchvision.datasets  # type: ignore[import-untyped]  # it ships no annotations

        try:
            return getattr(torchvision.datasets, type(self).__name__)(root, train=split != "test", download=self.download)
        except Exception as error:  # of the network, the disk, or a damaged file
            what = f"{Path(root) / self.folder} cannot be read: {error_text(error)}"
            raise ValueError(f"{what} (delete it and get it again: dataset.download=true)") from error


class MNIST(_Published):
    """Handwritten digits, 28 x 28."""

    info = {"in_channels": 1, "image_size": 28, "num_classes": 10}
    mean, std, padding, flip = (0.1307,), (0.3081,), 2, False
    folder, files = "MNIST/raw", _IDX


class FashionMNIST(_Published):
    """Pictures of clothes, 28 x 28: from torchvision's folder, or else from the folder of Debian's package."""

    info = {"in_channels": 1, "image_size": 28, "num_classes": 10}
    mean, std, padding = (0.2860,), (0.3530,), 2
    folder, files = "FashionMNIST/raw", _IDX
    remedy = "dataset.download=true or apt-get install dataset-fashion-mnist"

    @property
    def _is_debians(self) -> bool:
        return not self.download and bool(super().problems()) and DEBIAN.is_dir()

    def problems(self) -> list[str]:
        return [] if self._is_debians else super().problems()

    def _made(self, root: str, split: Split) -> Any:
        if not self._is_debians:
            return super()._made(root, split)
        with TemporaryDirectory(prefix="steadfast_") as folder:
            raw = Path(folder, self.folder)
            raw.mkdir(parents=True)
            for name in self.files:
                with gzip.open(DEBIAN / f"{name}.gz") as packed, open(raw / name, "wb") as plain:
                    shutil.copyfileobj(packed, plain)
            return super()._made(folder, split)


class CIFAR10(_Published):
    """Photographs, 32 x 32. torchvision compares the files with known checksums, before it unpickles them."""

    info = {"in_channels": 3, "image_size": 32, "num_classes": 10}
    mean, std, padding = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 4
    folder = "cifar-10-batches-py"
    files = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")


class CIFAR100(_Published):
    """Photographs, 32 x 32, with fine labels. torchvision compares the files with known checksums, before it unpickles them."""

    info = {"in_channels": 3, "image_size": 32, "num_classes": 100}
    mean, std, padding = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), 4
    folder, files = "cifar-100-python", ("train", "test", "meta")
