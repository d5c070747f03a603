"""Digits: 1,797 scanned digits of 8 x 8 pixels, out of the installed scikit-learn wheel."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from framework.data.source import Arrays, Split, require_at_least
from framework.randomness import permutation

if TYPE_CHECKING:
    from torch import Tensor

MEAN, STD = (0.3058,), (0.3754,)  # of the training split
FIRST_VAL, FIRST_TEST = 1258, 1438  # 70 % train, 10 % val, 20 % test


class Digits:
    """The test set of the UCI optical digits; scikit-learn carries it as a file, and is never imported.

    Grey values 0..16 are stretched to 0..255. The file is ordered by writer, so the splits are cut from one fixed
    permutation of it, the same for every seed: runs that differ in their seed are compared on the same test set.
    """

    task = "classification"
    info: Mapping[str, int] = {"in_channels": 1, "image_size": 8, "num_classes": 10}

    def __init__(self, *, augment: bool = False, num_workers: int = 0):
        require_at_least(0, num_workers=num_workers)
        self.augment = augment
        self.num_workers = num_workers

    def problems(self) -> list[str]:
        if not _csv().is_file():
            return [f"dataset: digits are read from scikit-learn, and there is no {_csv()} (pip install scikit-learn)"]
        return []

    def load(self, split: Split) -> Arrays:
        if problems := self.problems():
            raise ValueError(problems[0])
        rows = np.loadtxt(_csv(), delimiter=",", dtype=np.int64)  # 64 pixels and the label
        order = permutation(len(rows))
        parts = {"train": order[:FIRST_VAL], "val": order[FIRST_VAL:FIRST_TEST], "test": order[FIRST_TEST:]}
        rows = rows[parts[split]]
        images = np.rint(rows[:, :64] * (255 / 16)).astype(np.uint8)
        return Arrays(images.reshape(-1, 1, 8, 8), rows[:, 64].copy())

    def transform(self, inputs: "Tensor", targets: "Tensor", *, keys: np.ndarray | None) -> tuple["Tensor", "Tensor"]:
        from framework.data.images import prepare

        keys = keys if self.augment else None
        return prepare(inputs, keys=keys, mean=MEAN, std=STD, padding=1, flip=False), targets


def _csv() -> Path:
    spec = importlib.util.find_spec("sklearn")  # finding a top-level package does not run it
    package = next(iter(spec.submodule_search_locations or ()), "sklearn") if spec else "sklearn"
    return Path(package) / "datasets" / "data" / "digits.csv.gz"
