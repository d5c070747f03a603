"""CIFAR-10 and CIFAR-100: 60,000 photographs each, 32 x 32 pixels, in ten and in a hundred classes.

Their binary form: the other one, "for Python", is pickles, which are programs.
Source: www.cs.toronto.edu/~kriz/cifar.html: each record is a label (CIFAR-100: the coarse and the fine one), a byte
each, and 3 x 32 x 32 bytes of pixels.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from framework.data.source import Arrays, Split, require_at_least

if TYPE_CHECKING:
    from torch import Tensor

MEAN_10, STD_10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
MEAN_100, STD_100 = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
NUM_TRAIN = 50_000
NUM_PIXELS = 3 * 32 * 32
SITE = "https://www.cs.toronto.edu/~kriz"


@dataclass(frozen=True)
class _Archive:
    """One of the two, as its authors publish it."""

    file: str
    md5: str
    folder: str
    python_folder: str  # where torchvision has the version that is not read
    train: tuple[str, ...]
    test: str
    num_labels: int  # a record has; the last one counts
    num_classes: int


_TEN = _Archive(
    file="cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    folder="cifar-10-batches-bin",
    python_folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test="test_batch.bin",
    num_labels=1,
    num_classes=10,
)
_HUNDRED = _Archive(
    file="cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    folder="cifar-100-binary",
    python_folder="cifar-100-python",
    train=("train.bin",),
    test="test.bin",
    num_labels=2,
    num_classes=100,
)


class CIFAR10:
    """The binary version's files, root/cifar-10-batches-bin; val is the last `num_val` of the training set."""

    task = "classification"
    info: Mapping[str, int] = {"in_channels": 3, "image_size": 32, "num_classes": 10}

    def __init__(
        self,
        *,
        root: str = "data",
        download: bool = False,
        num_val: int = 5000,
        augment: bool = False,
        num_workers: int = 0,
    ):
        _check(num_val=num_val, num_workers=num_workers)
        self.root = root
        self.download = download
        self.num_val = num_val
        self.augment = augment
        self.num_workers = num_workers

    def problems(self) -> list[str]:
        return _problems(_TEN, root=self.root, download=self.download)

    def load(self, split: Split) -> Arrays:
        return _load(_TEN, split, root=self.root, download=self.download, num_val=self.num_val)

    def transform(self, inputs: "Tensor", targets: "Tensor", *, keys: np.ndarray | None) -> tuple["Tensor", "Tensor"]:
        from framework.data.images import prepare

        keys = keys if self.augment else None
        return prepare(inputs, keys=keys, mean=MEAN_10, std=STD_10, padding=4, flip=True), targets


class CIFAR100:
    """The binary version's files, root/cifar-100-binary, fine labels; val is the last `num_val` of the training set."""

    task = "classification"
    info: Mapping[str, int] = {"in_channels": 3, "image_size": 32, "num_classes": 100}

    def __init__(
        self,
        *,
        root: str = "data",
        download: bool = False,
        num_val: int = 5000,
        augment: bool = False,
        num_workers: int = 0,
    ):
        _check(num_val=num_val, num_workers=num_workers)
        self.root = root
        self.download = download
        self.num_val = num_val
        self.augment = augment
        self.num_workers = num_workers

    def problems(self) -> list[str]:
        return _problems(_HUNDRED, root=self.root, download=self.download)

    def load(self, split: Split) -> Arrays:
        return _load(_HUNDRED, split, root=self.root, download=self.download, num_val=self.num_val)

    def transform(self, inputs: "Tensor", targets: "Tensor", *, keys: np.ndarray | None) -> tuple["Tensor", "Tensor"]:
        from framework.data.images import prepare

        keys = keys if self.augment else None
        return prepare(inputs, keys=keys, mean=MEAN_100, std=STD_100, padding=4, flip=True), targets


def _check(*, num_val: int, num_workers: int) -> None:
    require_at_least(1, num_val=num_val)
    require_at_least(0, num_workers=num_workers)
    if num_val >= NUM_TRAIN:
        raise ValueError(f"dataset.num_val={num_val}: must be below the {NUM_TRAIN} images of the training set")


def _problems(archive: _Archive, *, root: str, download: bool) -> list[str]:
    folder = Path(root) / archive.folder
    missing = [name for name in (*archive.train, archive.test) if not (folder / name).is_file()]
    if missing and not download and (python := Path(root) / archive.python_folder).is_dir():
        return [
            f"dataset.root: {python} holds pickles, which are not read; the binary version is (dataset.download=true)"
        ]
    if missing and not download:
        return [f"dataset.root: {', '.join(missing)} not in {folder} (dataset.download=true)"]
    if missing and importlib.util.find_spec("torchvision") is None:
        return ["dataset.download: torchvision fetches it, and is not installed (pip install torchvision)"]
    return []


def _load(archive: _Archive, split: Split, *, root: str, download: bool, num_val: int) -> Arrays:
    if problems := _problems(archive, root=root, download=download):
        raise ValueError(problems[0])
    if download and _problems(archive, root=root, download=False):
        _fetch(archive, root=root)
    names = (archive.test,) if split == "test" else archive.train
    parts = [_read(Path(root) / archive.folder / name, archive) for name in names]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts))
    if split != "test":
        part = slice(None, -num_val) if split == "train" else slice(-num_val, None)
        images, labels = images[part], labels[part]
    return Arrays(np.ascontiguousarray(images), labels)


def _read(path: Path, archive: _Archive) -> tuple[np.ndarray, np.ndarray]:
    """Read one file: images uint8 (N, 3, 32, 32) and labels int64 (N,). ValueError if it is damaged."""
    record = archive.num_labels + NUM_PIXELS
    content = np.fromfile(path, dtype=np.uint8)
    if content.size == 0 or content.size % record:
        raise ValueError(
            f"{path} is damaged: {content.size} bytes are not images of {record} (delete it and get it again)"
        )
    content = content.reshape(-1, record)
    labels = content[:, archive.num_labels - 1].astype(np.int64)  # the fine one is the last
    if labels.max() >= archive.num_classes:
        raise ValueError(f"{path} is damaged: it has class {labels.max()} of {archive.num_classes} "
                         "(delete it and get it again)")  # fmt: skip
    return content[:, archive.num_labels :].reshape(-1, 3, 32, 32), labels


def _fetch(archive: _Archive, *, root: str) -> None:
    from framework.runtime.torchvision_fix import make_torchvision_importable

    make_torchvision_importable()
    from torchvision.datasets.utils import download_and_extract_archive  # type: ignore[import-untyped]  # unannotated

    try:
        download_and_extract_archive(f"{SITE}/{archive.file}", root, md5=archive.md5)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{archive.file} could not be fetched into {root}: {error}") from error
