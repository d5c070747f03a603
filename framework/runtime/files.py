"""Files that appear complete or do not appear at all."""

import errno
import fcntl
import hashlib
import json
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path, *, is_flushed: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the same folder. At the end, flush the file and rename it to `path`; on an error, remove it.

    Without the flush, a power cut may leave an empty file. The new file has the permissions of any new file (umask); the
    permissions that the writing library sets do not matter.
    """
    beside = _beside(path)
    try:
        beside.touch(exist_ok=False)
        mode = beside.stat().st_mode
        yield beside
        if beside.stat().st_mode != mode:
            beside.chmod(mode)
        if is_flushed:
            flush_to_disk(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory beside `path`. At the end, flush it and replace `path` with it; on an error, remove it."""
    beside, before = _beside(path), _beside(path)
    try:
        beside.mkdir()
        yield beside
        for file in beside.rglob("*"):
            if file.is_file():
                flush_to_disk(file)
        if path.exists():
            os.replace(path, before)
        os.replace(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(before, ignore_errors=True)


def _beside(path: Path) -> Path:
    # do not use the process id: a process on another machine, or in another container, may have the same id
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def replaced_by(name: str) -> str | None:
    """Return the name of the file that a temporary file with this name replaces. Return None if it is no temporary name."""
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}", name)
    return match and match[1]


def write_atomically(path: Path, text: str, *, is_flushed: bool = True) -> None:
    """Write a file. A reader sees the old content or the new content, never a part."""
    with replacing(path, is_flushed=is_flushed) as beside:
        beside.write_text(text)


def checksum(path: Path, new: Callable[[], Any] = hashlib.blake2b) -> tuple[int, str]:
    """Return a file's size in bytes and its digest in hexadecimal digits (`b2sum` and `sha256sum` print the same digits)."""
    digest, size = new(), 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(8 << 20):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def tail(path: Path, *, num_bytes: int) -> bytes:
    """Return the end of a file."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
        return file.read()


def facts_in(content: str | bytes) -> dict[str, Any]:
    """Return the JSON object in the content of a file, or {} if it is damaged, or something else."""
    with suppress(ValueError, RecursionError):
        facts = json.loads(content)
        return facts if isinstance(facts, dict) else {}
    return {}


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, so that each of them survives a power cut.

    The name of an existing directory is flushed too: the process that made the directory may have been killed before its
    flush.
    """
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
    with suppress(PermissionError):  # the directory belongs to another user
        flush_to_disk(path.parent)


def require_room(path: Path) -> None:
    """Raise the OSError of a full disk if less than one megabyte is free for files below `path`."""
    while not path.exists():
        path = path.parent
    if shutil.disk_usage(path).free < 1 << 20:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def lock_file(path: Path, *, waits: bool) -> int | None:
    """Take the kernel's lock (flock) of a file, and create the file if necessary. Return the file descriptor.

    Closing the descriptor releases the lock. Return None if another process has the lock and `waits` is false, or if the
    locked file was removed in the meantime.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    os.close(descriptor)
    return None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the kernel's lock of a file, and hold it."""
    while (descriptor := lock_file(path, waits=True)) is None:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def flush_to_disk(path: Path) -> None:
    """Make a file's content, or the names in a directory, survive a power cut. Flushing a file does not flush its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_files() -> int:
    """Let this process and its children open as many files as the system allows (up to 65,536). Return this number.

    The usual limit of 1,024 is for programs that call select(). Each tensor that a loader worker sends is an open file.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_MANY_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    most = max(soft, min(hard, _MANY_FILES))
    if most > soft:
        with suppress(ValueError):  # a kernel may allow fewer than its limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


_MANY_FILES = 1 << 16


def own_file_positions() -> None:
    """Give this forked process its own positions in the files that it reads. A fork shares each position with the parent.

    If two processes then seek and read, each reads where the other has sought. Files that are written keep their locks.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # the listing's own descriptor; a file that may no longer be opened
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or flags & os.O_ACCMODE != os.O_RDONLY:
                continue
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
            own = os.open(_path_of(descriptor), os.O_RDONLY)
            os.lseek(own, position, os.SEEK_SET)
            os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
            os.close(own)


def _path_of(descriptor: int) -> str | bytes:
    """Return a path that opens the file of a descriptor anew. OSError if there is none."""
    if (get_path := getattr(fcntl, "F_GETPATH", None)) is None:  # on Linux, also for a file that has been deleted
        return f"/proc/self/fd/{descriptor}"
    found: bytes = fcntl.fcntl(descriptor, get_path, bytes(1024))
    return found.rstrip(b"\0")
