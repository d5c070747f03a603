"""The files that components read when they are built. They count as code, by their content when they were read."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128

from framework.runtime.files import checksum

CONTENT = "its content"
_SMALL = 1 << 20  # bytes: such a file is hashed when it is read


class _File(NamedTuple):
    path: str  # "" if the component writes it too
    stamp: tuple[int, ...] = ()  # it changes with the content
    content: str = ""  # of a small file: its hash


_READ: dict[str, _File] = {}  # by `./FILE` from here, or by the whole path
_recorded: dict[tuple[str, _File], Mapping[str, str]] = {}


def is_file(name: str) -> bool:
    """Return whether this is the name of a file that components have read, and not of a module."""
    return name[0] in "./"


def note(name: str, path: str, *, is_written: bool) -> None:
    """Note that a component opens a file."""
    if is_written or name not in _READ:
        file = _READ[name] = _File("" if is_written else path, () if is_written else _stamp(path))
        if file.stamp and file.stamp[1] <= _SMALL:  # the hash reads it too, which is noted already
            _READ[name] = file._replace(content=hash_now(Path(path)))


def forget() -> None:
    """Forget all files."""
    _READ.clear()
    _recorded.clear()


def files_read() -> dict[str, str]:
    """Return the paths of the files that are read, and not written too, by their names."""
    return {name: file.path for name, file in _READ.items() if file.path}


def hash_now(path: Path) -> str:
    """Return the hash of a file's content now."""
    return _hash(path, _stamp(str(path)))


def as_read(name: str, now: Mapping[str, str]) -> Mapping[str, str]:
    """Return what a file held when it was read, as a hash by part; `now` is what it holds now."""
    if (file := _READ.get(name)) is None:
        return now
    if file.stamp == _stamp(file.path):
        _recorded[name, file] = now
    return _recorded.get((name, file), {CONTENT: file.content or "changed before it was recorded"})


@functools.cache  # a start asks several times, and hashing gigabytes takes seconds
def _hash(path: Path, _: tuple[int, ...]) -> str:
    return checksum(path, xxh3_128)[1]


def _stamp(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
