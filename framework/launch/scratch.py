"""The temporary folder that the processes of a run share on one machine."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from framework.runtime.files import lock_file, locked


def remove_scratch(directory: Path) -> None:
    """Remove the folders that killed launches of the run in `directory` have left, except locked folders.

    The folders of other launchers (`common_folder`) are not in use while this process holds the run's lock.
    """
    for leftover in Path(tempfile.gettempdir()).glob(_prefix(directory) + "*"):
        with suppress(OSError):
            if (descriptor := lock_file(leftover / "lock", waits=False)) is not None:
                shutil.rmtree(leftover, ignore_errors=True)
                os.close(descriptor)


@contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """Yield a new folder. The caller passes it to the workers that it starts; torch also leaves its files there."""
    new = Path(tempfile.mkdtemp(prefix="steadfast_new_"))
    with locked(new / "lock"):  # at most until this process ends; the random part of the name may end with "_"
        folder = new.rename(new.with_name(_prefix(directory) + new.name.removeprefix("steadfast_new_")))
        tempfile.tempdir = str(folder)
        try:
            yield folder
        finally:
            tempfile.tempdir = None
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def common_folder(directory: Path, *, attempt: int) -> Iterator[Path]:
    """Yield one folder for all workers that another launcher has started here. The first worker that leaves removes it."""
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


def board_in(folder: Path, *, attempt: int) -> Path:
    return folder / f"board_{attempt}"
