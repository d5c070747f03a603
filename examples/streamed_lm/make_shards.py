"""Shards of text for a language model: tar files in WebDataset's layout, written once, from Python's standard library.

`python make_shards.py` writes them. A run also writes them if they do not exist.
"""

import io
import shutil
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEQ_LEN = 128  # tokens (bytes) per sample
SAMPLES_PER_SHARD = 256
NUM_SHARDS = {"train": 12, "val": 1, "test": 1}
FOLDER = Path("shards")


def shards(split: str) -> str:
    """Return the pattern of a split's shards. Write the shards first if they do not exist."""
    if not FOLDER.is_dir():
        write_all(FOLDER)
    return str(FOLDER / f"{split}-*.tar")


def write_all(folder: Path) -> None:
    """Write the shards of all splits, atomically. Several processes may call this at the same time."""
    beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    samples = windows()
    for split, num_shards in NUM_SHARDS.items():
        for number in range(num_shards):
            write_shard(beside / f"{split}-{number:03d}.tar", samples)
    try:
        beside.rename(folder)
    except OSError:  # another process was faster, and has written the same content
        shutil.rmtree(beside)


def write_shard(path: Path, samples: Iterator[np.ndarray]) -> None:
    """Write the next samples to a tar file, each as a file NUMBER.npy."""
    with tarfile.open(path, "w") as archive:
        for number in range(SAMPLES_PER_SHARD):
            np.save(file := io.BytesIO(), next(samples))
            member = tarfile.TarInfo(f"{number:08d}.npy")
            member.size = file.tell()
            file.seek(0)
            archive.addfile(member, file)


def windows() -> Iterator[np.ndarray]:
    """Yield the text in windows uint8 (SEQ_LEN + 1,). The targets are the inputs shifted by one."""
    num_bytes = sum(NUM_SHARDS.values()) * SAMPLES_PER_SHARD * (SEQ_LEN + 1)
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))[:num_bytes]
    yield from np.frombuffer(text, dtype=np.uint8).reshape(-1, SEQ_LEN + 1)


def pairs(records: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the records' inputs int64 (B, T) and targets int64 (B, T), which are the next tokens. T = SEQ_LEN."""
    tokens = np.array([record["npy"] for record in records], dtype=np.int64)
    return tokens[:, :-1], tokens[:, 1:]


if __name__ == "__main__":
    write_all(FOLDER)
