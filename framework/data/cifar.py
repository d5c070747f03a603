"""CIFAR-10 and CIFAR-100: 60,000 photographs each, 32 x 32 pixels, in ten and in a hundred classes."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from framework.data.source import Arrays, Split, require_at_least

if TYPE_CHECKING:
    from torch import Tensor

MEAN_10, STD_10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
MEAN_100, STD_100 = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
NUM_TRAIN = 50_000


class CIFAR10:
    """torchvision's files, root/cifar-10-batches-py; val is the last `num_val` of the training set."""

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
        files = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch", "batches.meta"]
        return _problems(Path(self.root) / "cifar-10-batches-py", files=files, download=self.download)

    def load(self, split: Split) -> Arrays:
        return _load("CIFAR10", split, root=self.root, download=self.download, num_val=self.num_val)

    def transform(self, inputs: "Tensor", targets: "Tensor", *, keys: np.ndarray | None) -> tuple["Tensor", "Tensor"]:
        from framework.data.images import prepare

        keys = keys if self.augment else None
        return prepare(inputs, keys=keys, mean=MEAN_10, std=STD_10, padding=4, flip=True), targets


class CIFAR100:
    """torchvision's files, root/cifar-100-python, fine labels; val is the last `num_val` of the training set."""

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
        files = ["train", "test", "meta"]
        return _problems(Path(self.root) / "cifar-100-python", files=files, download=self.download)

    def load(self, split: Split) -> Arrays:
        return _load("CIFAR100", split, root=self.root, download=self.download, num_val=self.num_val)

    def transform(self, inputs: "Tensor", targets: "Tensor", *, keys: np.ndarray | None) -> tuple["Tensor", "Tensor"]:
        from framework.data.images import prepare

        keys = keys if self.augment else None
        return prepare(inputs, keys=keys, mean=MEAN_100, std=STD_100, padding=4, flip=True), targets


def _check(*, num_val: int, num_workers: int) -> None:
    require_at_least(1, num_val=num_val)
    require_at_least(0, num_workers=num_workers)
    if num_val >= NUM_TRAIN:
        raise ValueError(f"dataset.num_val={num_val}: must be below the {NUM_TRAIN} images of the training set")


def _problems(folder: Path, *, files: Sequence[str], download: bool) -> list[str]:
    problems = []
    if importlib.util.find_spec("torchvision") is None:
        problems.append("dataset: CIFAR is read by torchvision, which is not installed (pip install torchvision)")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing and not download:
        problems.append(f"dataset.root: {', '.join(missing)} not in {folder} (dataset.download=true)")
    return problems


def _load(name: Literal["CIFAR10", "CIFAR100"], split: Split, *, root: str, download: bool, num_val: int) -> Arrays:
    from framework.torchvision_import import make_torchvision_importable

    make_torchvision_importable()
    import torchvision.datasets  # type: ignore[import-untyped]  # it ships no annotations

    try:  # files that are there and whole are not fetched again; their checksums are verified before they are unpickled
        loaded = getattr(torchvision.datasets, name)(root, train=split != "test", download=download)
    except RuntimeError as error:
        raise ValueError(f"{name} in {root}: {error} (dataset.download=true)") from error
    images, labels = loaded.data.transpose(0, 3, 1, 2), np.array(loaded.targets, dtype=np.int64)
    if split != "test":
        part = slice(None, -num_val) if split == "train" else slice(-num_val, None)
        images, labels = images[part], labels[part]
    return Arrays(np.ascontiguousarray(images), labels)
