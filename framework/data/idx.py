"""The IDX files of MNIST and its relatives: finding, reading and downloading them."""

import gzip
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from framework.data.source import Arrays, Split

# torchvision's reader would do, but importing it costs as much as torch.
TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
UINT8 = 0x08  # the one element type in use


def find_folder(folders: Sequence[Path]) -> Path | None:
    """Return the first folder that holds all four files, each plain or as .gz."""
    for folder in folders:
        if all(_file(folder, name).is_file() for name in TRAIN + TEST):
            return folder
    return None


def load_split(folders: Sequence[Path], split: Split, *, num_val: int) -> Arrays:
    """Load a split as images uint8 (N, 1, H, W) and labels int64; val is the last `num_val` of the training files."""
    folder = find_folder(folders)
    if folder is None:
        raise ValueError(missing(folders))
    images, labels = (read_idx(_file(folder, name)) for name in (TEST if split == "test" else TRAIN))
    if split != "test":
        if num_val >= len(images):
            raise ValueError(f"dataset.num_val={num_val}: must be below the {len(images)} images of {folder}")
        part = slice(None, -num_val) if split == "train" else slice(-num_val, None)
        images, labels = images[part], labels[part]
    return Arrays(images[:, None], labels.astype(np.int64))


def read_idx(path: Path) -> np.ndarray:
    """Read one file of unsigned bytes, plain or gzip.

    Raises ValueError if it is anything else. Source: the file format section of yann.lecun.com/exdb/mnist: two zero
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


def missing(folders: Sequence[Path]) -> str:
    """Word the problem that none of the folders holds the files."""
    looked = ", ".join(str(folder) for folder in folders)
    return f"{TRAIN[0]} and its three companions, plain or .gz, are not in {looked}"


def download(name: Literal["MNIST", "FashionMNIST"], *, root: str) -> None:
    """Let torchvision fetch the files into root/<name>/raw, unless they are there. One process at a time."""
    from framework.runtime.torchvision_fix import make_torchvision_importable

    make_torchvision_importable()
    import torchvision.datasets  # type: ignore[import-untyped]  # it ships no annotations

    getattr(torchvision.datasets, name)(root, download=True)


def _file(folder: Path, name: str) -> Path:
    plain = folder / name
    return plain if plain.is_file() else folder / f"{name}.gz"
