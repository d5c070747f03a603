"""Published sets of labelled images: MNIST and Fashion-MNIST, which torchvision reads, CIFAR-10 and CIFAR-100."""

import gzip
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np

from framework.data.source import Arrays, Images, Split, require_at_least
from framework.runtime.exits import error_text

_IDX = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # the package dataset-fashion-mnist


@dataclass(kw_only=True, eq=False)
class _Published(Images):
    """The dataset with the name of the class. val is the last `num_val` samples of the training set."""

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
        images, labels = self._read(Path(self.root), split)
        if split == "test":
            return Arrays(images, labels)
        if self.num_val >= len(images):
            raise ValueError(f"dataset.num_val={self.num_val}: must be below the {len(images)} images of the training set")
        part = slice(None, -self.num_val) if split == "train" else slice(-self.num_val, None)
        return Arrays(images[part], labels[part])

    def _read(self, root: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Return the images, uint8 (N, C, H, W), and labels, int64 (N,), of the test set or of the training set."""
        from torchvision import datasets  # type: ignore[import-untyped]  # it ships no annotations

        part = root / self.folder / ("t10k" if split == "test" else "train")
        try:
            if not all((root / self.folder / name).is_file() for name in self.files):
                getattr(datasets, type(self).__name__)(root, download=True)
            images = datasets.mnist.read_image_file(f"{part}-images-idx3-ubyte")
            labels = datasets.mnist.read_label_file(f"{part}-labels-idx1-ubyte")
        except Exception as error:  # of the network, the disk, or a damaged file
            what = f"{root / self.folder} cannot be read: {error_text(error)}"
            raise ValueError(f"{what} (delete it and get it again: dataset.download=true)") from error
        return images.numpy()[:, None], labels.numpy()


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

    def _read(self, root: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
        if not self._is_debians:
            return super()._read(root, split)
        with TemporaryDirectory(prefix="steadfast_") as folder:
            raw = Path(folder, self.folder)
            raw.mkdir(parents=True)
            for name in self.files:
                with gzip.open(DEBIAN / f"{name}.gz") as packed, open(raw / name, "wb") as plain:
                    shutil.copyfileobj(packed, plain)
            return super()._read(Path(folder), split)


class _CIFAR(_Published):
    """Photographs, 32 x 32. The binary version: torchvision reads the version "for Python", which consists of pickles.

    Source: www.cs.toronto.edu/~kriz/cifar.html: each record is a label (CIFAR-100: the coarse and the fine label), one byte
    each, and 3 x 32 x 32 bytes of pixels.
    """

    mean, std, padding = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 4
    archive: ClassVar[str]
    md5: ClassVar[str]
    num_labels: ClassVar[int]  # of a record; the last label counts

    def _read(self, root: Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
        if not all((root / self.folder / name).is_file() for name in self.files):
            self._fetch(root)
        *train, test = (root / self.folder / name for name in self.files)
        records = np.concatenate([self._records(path) for path in ([test] if split == "test" else train)])
        labels = records[:, self.num_labels - 1].astype(np.int64)
        return np.ascontiguousarray(records[:, self.num_labels :]).reshape(-1, 3, 32, 32), labels

    def _records(self, path: Path) -> np.ndarray:
        size, content = self.num_labels + 3 * 32 * 32, np.fromfile(path, dtype=np.uint8)
        what = f"{content.size} bytes are not images of {size}"
        if content.size and content.size % size == 0:
            records = content.reshape(-1, size)
            if (largest := records[:, self.num_labels - 1].max()) < self.info["num_classes"]:
                return records
            what = f"it has class {largest} of {self.info['num_classes']}"
        raise ValueError(f"{path} is damaged: {what} (delete it and get it again)")

    def _fetch(self, root: Path) -> None:
        from torchvision.datasets.utils import download_and_extract_archive  # type: ignore[import-untyped]  # unannotated

        try:
            download_and_extract_archive(f"https://www.cs.toronto.edu/~kriz/{self.archive}", str(root), md5=self.md5)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{self.archive} could not be fetched into {root}: {error}") from error


class CIFAR10(_CIFAR):
    info = {"in_channels": 3, "image_size": 32, "num_classes": 10}
    folder, num_labels = "cifar-10-batches-bin", 1
    files = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
    archive, md5 = "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"


class CIFAR100(_CIFAR):
    """The same, with 100 classes: the fine labels."""

    info = {"in_channels": 3, "image_size": 32, "num_classes": 100}
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    folder, num_labels, files = "cifar-100-binary", 2, ("train.bin", "test.bin")
    archive, md5 = "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"
