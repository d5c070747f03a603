"""The IDX files of MNIST and similar datasets."""

import gzip
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np

from framework.data.source import Arrays, PublishedImages, Split

# not torchvision's reader, because its import takes as long as the import of torch
TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
UINT8 = 0x08  # the only element type in use


class IDXImages(PublishedImages):
    """A dataset in four files, each plain or as .gz, with the names that torchvision uses."""

    name: Literal["MNIST", "FashionMNIST"]
    info = {"in_channels": 1, "image_size": 28, "num_classes": 10}
    padding = 2
    remedy = "dataset.download=true"

    @property
    def folders(self) -> list[Path]:
        """The folders to search for the files, in this order."""
        return [Path(self.root) / self.name / "raw"]

    def problems(self) -> list[str]:
        return [] if self.download or self._folder() else [f"dataset.root: {self._missing()} ({self.remedy})"]

    def load(self, split: Split) -> Arrays:
        if self.download and not self._folder():
            self._fetch()
        if (folder := self._folder()) is None:
            raise ValueError(self._missing())
        images, labels = (read_idx(_file(folder, name)) for name in (TEST if split == "test" else TRAIN))
        if split != "test" and self.num_val >= len(images):
            raise ValueError(f"dataset.num_val={self.num_val}: must be below the {len(images)} images of {folder}")
        return self.part(images[:, None], labels.astype(np.int64), split)

    def _folder(self) -> Path | None:
        return next((f for f in self.folders if all(_file(f, name).is_file() for name in TRAIN + TEST)), None)

    def _missing(self) -> str:
        return f"{TRAIN[0]} and its three companions, plain or .gz, are not in {', '.join(map(str, self.folders))}"

    def _fetch(self) -> None:
        from framework.runtime.torchvision_fix import make_torchvision_importable

        make_torchvision_importable()
        import torchvision.datasets  # type: ignore[import-untyped]  # it ships no annotations

        getattr(torchvision.datasets, self.name)(self.root, download=True)


def read_idx(path: Path) -> np.ndarray:
    """Read one file of unsigned bytes, plain or gzip.

    ValueError if it is anything else. Source: the file format section of yann.lecun.com/exdb/mnist: two zero
    bytes, element type, number of dims, the dims as big-endian uint32, then the elements.
    """
    content = path.read_bytes()
    try:
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        zero, element_type, num_dims = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{num_dims}I", content, offset=4)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise ValueError(f"{path} is damaged: {error} (delete it and get it again)") from error
    elements = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * num_dims)
    if (zero, element_type) != (0, UINT8) or elements.size != np.prod(shape, dtype=np.int64):
        raise ValueError(
            f"{path} is damaged: {elements.size} bytes follow a header of type {element_type:#x} and shape {shape}, "
            f"where type {UINT8:#x} and a byte for each element are expected (delete it and get it again)"
        )
    return elements.reshape(shape)


def _file(folder: Path, name: str) -> Path:
    plain = folder / name
    return plain if plain.is_file() else folder / f"{name}.gz"
