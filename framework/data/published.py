"""Published sets of labelled images: MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100. torchvision only downloads them."""

import gzip
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from framework.data.source import Arrays, AtLeastOne, Images, Split
from framework.runtime.exits import error_text

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
    num_val: AtLeastOne = 5000

    @property
    def there(self) -> Path:
        return Path(self.root) / self.folder

    @property
    def missing(self) -> list[str]:
        return [name for name in self.files if not (self.there / name).is_file()]

    def problems(self) -> list[str]:
        missing = [] if self.download else self.missing
        return [f"dataset.root: {', '.join(missing)} not in {self.there} ({self.remedy})"] if missing else []

    def load(self, split: Split) -> Arrays:
        try:
            if self.download and self.missing:
                self.fetch()
            images, labels = self.read(is_test=split == "test")
        except Exception as error:  # of the network, the disk, or a damaged file
            remedy = "delete it and get it again: dataset.download=true"
            raise ValueError(f"{self.there} cannot be read: {error_text(error)} ({remedy})") from error
        if split == "test":
            return Arrays(images, labels)
        if self.num_val >= len(images):
            raise ValueError(f"dataset.num_val={self.num_val}: must be below the {len(images)} images of the training set")
        part = slice(None, len(images) - self.num_val) if split == "train" else slice(len(images) - self.num_val, None)
        return Arrays(images[part], labels[part])

    @abstractmethod
    def fetch(self) -> None:
        """Download the files into the folder."""

    @abstractmethod
    def read(self, *, is_test: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the images, uint8 (N, C, H, W), and labels, int64 (N,), of the test set or of the training set."""


class MNIST(_Published):
    """Handwritten digits, 28 x 28. Source of the format, IDX: yann.lecun.com/exdb/mnist."""

    info = {"in_channels": 1, "image_size": 28, "num_classes": 10}
    mean, std, padding, flip = (0.1307,), (0.3081,), 2, False
    folder = "MNIST/raw"
    files = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))

    def fetch(self) -> None:
        from torchvision import datasets  # type: ignore[import-untyped]  # it ships no annotations

        getattr(datasets, type(self).__name__)(self.root, download=True)

    def read(self, *, is_test: bool) -> tuple[np.ndarray, np.ndarray]:
        images, labels = (self.content(name) for name in self.files[2 * is_test :][:2])
        return np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 28, 28), np.frombuffer(
            labels, np.uint8, offset=8
        ).astype(np.int64)

    def content(self, name: str) -> bytes:
        return (self.there / name).read_bytes()


class FashionMNIST(MNIST):
    """Pictures of clothes, 28 x 28: from torchvision's folder, or else from the folder of Debian's package."""

    mean, std, padding, flip = (0.2860,), (0.3530,), 2, True
    folder = "FashionMNIST/raw"
    remedy = "dataset.download=true or apt-get install dataset-fashion-mnist"

    @property
    def missing(self) -> list[str]:
        return [] if DEBIAN.is_dir() and not self.download else super().missing

    def content(self, name: str) -> bytes:
        if (self.there / name).is_file():
            return super().content(name)
        with gzip.open(DEBIAN / f"{name}.gz") as file:
            return file.read()


class CIFAR10(_Published):
    """Photographs, 32 x 32. The binary version: torchvision reads the version "for Python", which consists of pickles.

    Source: www.cs.toronto.edu/~kriz/cifar.html: each record is a label (CIFAR-100: the coarse and the fine label), one byte
    each, and 3 x 32 x 32 bytes of pixels.
    """

    info = {"in_channels": 3, "image_size": 32, "num_classes": 10}
    mean, std, padding = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 4
    folder = "cifar-10-batches-bin"
    files = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
    num_labels: ClassVar[int] = 1  # of a record; the last label counts
    archive: ClassVar[tuple[str, str]] = ("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530")  # its name and MD5 sum

    def fetch(self) -> None:
        from torchvision.datasets.utils import download_and_extract_archive  # type: ignore[import-untyped]  # unannotated

        name, md5 = self.archive
        download_and_extract_archive(f"https://www.cs.toronto.edu/~kriz/{name}", self.root, md5=md5)

    def read(self, *, is_test: bool) -> tuple[np.ndarray, np.ndarray]:
        names = self.files[-1:] if is_test else self.files[:-1]
        records = np.concatenate([self.records(name) for name in names])
        labels = records[:, self.num_labels - 1].astype(np.int64)
        return np.ascontiguousarray(records[:, self.num_labels :]).reshape(-1, 3, 32, 32), labels

    def records(self, name: str) -> np.ndarray:
        size, content = self.num_labels + 3 * 32 * 32, np.fromfile(self.there / name, dtype=np.uint8)
        if content.size == 0 or content.size % size:
            raise ValueError(f"{name} is damaged: {content.size} bytes are not images of {size}")
        records = content.reshape(-1, size)
        if (largest := records[:, self.num_labels - 1].max()) >= self.info["num_classes"]:
            raise ValueError(f"{name} is damaged: it has class {largest} of {self.info['num_classes']}")
        return records


class CIFAR100(CIFAR10):
    """The same, with 100 classes: the fine labels."""

    info = {"in_channels": 3, "image_size": 32, "num_classes": 100}
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    folder, num_labels, files = "cifar-100-binary", 2, ("train.bin", "test.bin")
    archive = ("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8")
