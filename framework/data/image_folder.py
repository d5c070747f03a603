"""Image folder: the user's own images, root/{train,val,test}/<class>/*.png (or .jpg, ...)."""

import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from framework.data.source import SPLITS, SUFFIXES, Arrays, AtLeastOne, Files, Images, Source, Split, decode_image

STATISTICS = {3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), 1: ((0.449,), (0.226,))}  # of ImageNet
CARVED: dict[str, range] = {"val": range(10), "test": range(10, 20)}  # percent of train, if the folder is missing


@dataclass(kw_only=True, eq=False)
class ImageFolder(Images):
    """Image files in a folder for each class. The classes are the folders in root/train, numbered in the order of their names.

    If root/val or root/test is missing, it is taken from train, 10 % each. A checksum of a file's name (`class/file`) decides,
    so no file changes its split when files are added or removed.

    A split that needs at most `decode_once_gib` decoded is decoded when it is loaded, and stays in memory. The samples of a
    larger split are decoded at each use, so such a split needs `num_workers`.
    """

    root: str = "data"
    source: str | None = None
    image_size: AtLeastOne = 64
    in_channels: Literal[1, 3] = 3
    decode_once_gib: Annotated[float, Ge(0)] = 1.0  # 0: never

    def __post_init__(self) -> None:
        self.mean, self.std = STATISTICS[self.in_channels]
        self.padding = self.image_size // 8

    @property
    def info(self) -> Mapping[str, int]:
        known = {"in_channels": self.in_channels, "image_size": self.image_size}
        classes = _folders(Path(self.root) / "train")
        return known | ({"num_classes": len(classes)} if classes else {})

    def problems(self) -> list[str]:
        root = Path(self.root)
        classes = _folders(root / "train")
        if not classes:
            source = f"; {self.source}" if self.source else ""
            return [f"dataset.root: {root / 'train'} has no class folders (expected {root}/train/<class>/*.png{source})"]
        problems = []
        for split in SPLITS:
            if unknown := set(_folders(root / split)) - set(classes):
                problems.append(f"dataset.root: no {root / 'train' / min(unknown)}, which {split} has (the same classes)")
            elif next(self._samples(split), None) is None:
                problems.append(f"dataset.root: no {split} image in {root} (more images, or a folder {root / split})")
        return problems

    def load(self, split: Split) -> Source:
        samples = list(self._samples(split))
        decode = partial(decode_image, image_size=self.image_size, in_channels=self.in_channels)
        files = Files([path for path, _ in samples], np.array([label for _, label in samples], dtype=np.int64), decode)
        if len(files) * self.in_channels * self.image_size**2 > self.decode_once_gib * 2**30:
            return files
        with ThreadPoolExecutor() as pool:  # PIL releases the interpreter's lock while it decodes
            return Arrays(np.stack(list(pool.map(decode, files.paths))), files.targets)

    def _samples(self, split: Split) -> Iterator[tuple[str, int]]:
        """Yield the split's files and class numbers in the order of class and name, one class at a time."""
        root = Path(self.root)
        carved = {name: part for name, part in CARVED.items() if not (root / name).is_dir()}
        folder = root / ("train" if split in carved else split)
        for label, name in enumerate(_folders(root / "train")):
            entries = list(os.scandir(folder / name)) if (folder / name).is_dir() else []
            files = sorted(entry.name for entry in entries if entry.is_file())  # a pipe would block
            for file in files:
                percent = zlib.crc32(f"{name}/{file}".encode()) % 100
                taken_by = next((other for other, part in carved.items() if percent in part), "train")
                if file.lower().endswith(SUFFIXES) and (folder.name != "train" or taken_by == split):
                    yield f"{folder}/{name}/{file}", label


def _folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
