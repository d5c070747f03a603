"""Digits: 1,797 scanned digits of 8 x 8 pixels, which are part of this package (`digits.md` names the source)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from framework.data.source import Arrays, Images, Split
from framework.randomness import permutation

_FILE = Path(__file__).with_name("digits.csv.gz")
FIRST_VAL, FIRST_TEST = 1258, 1438  # 70 % train, 10 % val, 20 % test


@dataclass(kw_only=True, eq=False)
class Digits(Images):
    """The test set of the UCI optical digits.

    Grey values 0..16 are stretched to 0..255. The file is ordered by writer, so the splits are taken from one fixed
    permutation of the file. It is the same for every seed, so that runs with different seeds use the same test set.
    """

    info = {"in_channels": 1, "image_size": 8, "num_classes": 10}
    mean, std = (0.3058,), (0.3754,)  # of the training split
    padding = 1
    flip = False

    def problems(self) -> list[str]:
        return [] if _FILE.is_file() else [f"dataset: {_FILE} is missing (install this package again)"]

    def load(self, split: Split) -> Arrays:
        rows = np.loadtxt(_FILE, delimiter=",", dtype=np.int64)  # 64 pixels and the label
        order = permutation(len(rows))
        parts = {"train": order[:FIRST_VAL], "val": order[FIRST_VAL:FIRST_TEST], "test": order[FIRST_TEST:]}
        rows = rows[parts[split]]
        images = np.rint(rows[:, :64] * (255 / 16)).astype(np.uint8)
        return Arrays(images.reshape(-1, 1, 8, 8), rows[:, 64].copy())
