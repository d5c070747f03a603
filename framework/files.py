"""Files that appear complete or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part: beside, flushed, renamed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def flush_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut (a file's own flush does not)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
