"""Files that appear complete or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write what is to become `path`: beside it, and renamed once it is on the disk. Gone on an error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    with replacing(path) as beside:
        beside.write_text(text)


def flush_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut (a file's own flush does not)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
