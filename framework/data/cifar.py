"""CIFAR-10 and CIFAR-100: 60,000 photographs each, 32 x 32 pixels, in ten and in a hundred classes.

The reader uses the binary version: the version "for Python" consists of pickles, and a pickle can run any program.
Source: www.cs.toronto.edu/~kriz/cifar.html: each record is a label (CIFAR-100: the coarse and the fine label), one byte
each, and 3 x 32 x 32 bytes of pixels.
"""

import importlib.util
from pathlib import Path

import numpy as np

from framework.data.source import Arrays, PublishedImages, Split

NUM_TRAIN = 50_000
NUM_PIXELS = 3 * 32 * 32
SITE = "https://www.cs.toronto.edu/~kriz"


class _CIFAR(PublishedImages):
    info: dict[str, int]
    archive: str
    md5: str
    folder: str
    python_folder: str  # of the version for Python, which is not read
    train: tuple[str, ...]
    test: str
    num_labels: int  # of a record; the last label counts
    padding = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_val >= NUM_TRAIN:
            raise ValueError(f"dataset.num_val={self.num_val}: must be below the {NUM_TRAIN} images of the training set")

    def problems(self) -> list[str]:
        missing = ", ".join(self._missing())
        if not missing or (self.download and importlib.util.find_spec("torchvision") is not None):
            return []
        if self.download:
            return ["dataset.download: torchvision downloads the data, and is not installed (pip install torchvision)"]
        if (python := Path(self.root) / self.python_folder).is_dir():
            return [f"dataset.root: {python} has pickles, which are not read (dataset.download=true gets the binary version)"]
        return [f"dataset.root: {missing} not in {Path(self.root) / self.folder} (dataset.download=true)"]

    def load(self, split: Split) -> Arrays:
        if problems := self.problems():
            raise ValueError(problems[0])
        if self._missing():
            self._fetch()
        names = (self.test,) if split == "test" else self.train
        parts = [self._read(Path(self.root) / self.folder / name) for name in names]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts))
        return self.part(images, labels, split)

    def _missing(self) -> list[str]:
        return [name for name in (*self.train, self.test) if not (Path(self.root) / self.folder / name).is_file()]

    def _read(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read one file: images uint8 (N, 3, 32, 32) and labels int64 (N,). ValueError if it is damaged."""
        record = self.num_labels + NUM_PIXELS
        content = np.fromfile(path, dtype=np.uint8)
        if content.size == 0 or content.size % record:
            raise ValueError(f"{path} is damaged: {content.size} bytes are not images of {record} (delete it and get it again)")
        content = content.reshape(-1, record)
        labels = content[:, self.num_labels - 1].astype(np.int64)  # the fine label is the last
        if labels.max() >= self.info["num_classes"]:
            raise ValueError(f"{path} is damaged: it has class {labels.max()} of {self.info['num_classes']} "
                             "(delete it and get it again)")  # fmt: skip
        return content[:, self.num_labels :].reshape(-1, 3, 32, 32), labels

    def _fetch(self) -> None:
        from framework.runtime.torchvision_fix import make_torchvision_importable

        make_torchvision_importable()
        from torchvision.datasets.utils import download_and_extract_archive  # type: ignore[import-untyped]  # unannotated

        try:
            download_and_extract_archive(f"{SITE}/{self.archive}", self.root, md5=self.md5)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{self.archive} could not be fetched into {self.root}: {error}") from error


class CIFAR10(_CIFAR):
    """The files of the binary version, in root/cifar-10-batches-bin; val is the last `num_val` samples of the training set."""

    info = {"in_channels": 3, "image_size": 32, "num_classes": 10}
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    archive, md5 = "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
    folder, python_folder = "cifar-10-batches-bin", "cifar-10-batches-py"
    train, test = tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"
    num_labels = 1


class CIFAR100(_CIFAR):
    """The files of the binary version, in root/cifar-100-binary, fine labels; val is the last `num_val` training samples."""

    info = {"in_channels": 3, "image_size": 32, "num_classes": 100}
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    archive, md5 = "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"
    folder, python_folder = "cifar-100-binary", "cifar-100-python"
    train, test = ("train.bin",), "test.bin"
    num_labels = 2
