"""The temporary folder that the processes of a run share on one machine."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sweep(directory: Path) -> None:
    """Remove what earlier launches of the run in `directory` have left, having been killed. Its lock must be held."""
    for leftover in Path(tempfile.gettempdir()).glob(_prefix(directory) + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """Yield a new folder, which the caller hands to the workers that it starts."""
    with tempfile.TemporaryDirectory(prefix=_prefix(directory), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def common_folder(directory: Path, *, attempt: int) -> Iterator[Path]:
    """Yield one folder to all workers that one launcher, not ours, has started here. The first to leave removes it."""
    folder = Path(tempfile.gettempdir(), f"{_prefix(directory)}{os.getppid()}_{attempt}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; remove it")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(directory: Path) -> str:
    return f"steadfast_{hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:16]}_"
