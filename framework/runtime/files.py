"""Files that appear complete or not at all."""

import errno
import fcntl
import hashlib
import os
import re
import resource
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path, *, is_flushed: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the same folder; it is flushed and renamed to `path` at the end, and removed on an error.

    Without the flush, a power cut may leave an empty file. The new file has the permissions of any new file (umask), whatever
    the library that writes it gives.
    """
    beside = _beside(path)
    try:
        beside.touch(exist_ok=False)
        mode = beside.stat().st_mode
        yield beside
        if beside.stat().st_mode != mode:
            beside.chmod(mode)
        if is_flushed:
            with open(beside, "rb") as file:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory beside `path`; flushed, it takes the place of `path` at the end; it is removed on an error."""
    beside, before = _beside(path), _beside(path)
    try:
        beside.mkdir()
        yield beside
        for file in beside.rglob("*"):
            if file.is_file():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
        if path.exists():
            os.replace(path, before)
        os.replace(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(before, ignore_errors=True)


def _beside(path: Path) -> Path:
    # not the process's id: on another machine, or in another container, another process may have the same
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def replaced_by(name: str) -> str | None:
    """Return the name of the file that a temporary file of such a name was to replace; None for the name of any other."""
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}", name)
    return match and match[1]


def write_atomically(path: Path, text: str, *, is_flushed: bool = True) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    with replacing(path, is_flushed=is_flushed) as beside:
        beside.write_text(text)


def checksum(path: Path, algorithm: str = "blake2b") -> tuple[int, str]:
    """Return a file's size in bytes and its digest, in hexadecimal digits (which `b2sum` or `sha256sum` print too)."""
    digest, size = hashlib.new(algorithm), 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, each of which survives a power cut.

    The name of an existing directory is flushed too: the process that made it may have been killed before that.
    """
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
    with suppress(PermissionError):  # the directory of another user
        flush_directory(path.parent)


def require_room(path: Path) -> None:
    """Raise the OSError of a full disk if less than a megabyte is free for files below `path`."""
    while not path.exists():
        path = path.parent
    if shutil.disk_usage(path).free < 1 << 20:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def lock_file(path: Path, *, waits: bool) -> int | None:
    """Take the kernel's lock (flock) of a file, which is created. Returns its descriptor: closing it releases the lock.

    None where another process has the lock and `waits` is false, or where the locked file was removed meanwhile.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    os.close(descriptor)
    return None


def flush_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut; flushing a file does not flush its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_files() -> int:
    """Let this process, and each that it starts, open as many files as it may (up to 65,536); return how many that is.

    The usual 1,024 are for programs that call select(). Each tensor on its way from a loader worker is an open file.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_MANY_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    most = max(soft, min(hard, _MANY_FILES))
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    return most


_MANY_FILES = 1 << 16
