"""Files with a checksum (xxh3, 128 bits), computed during writing or reading. It detects damage, but not an attacker."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

_BLOCK = 8 << 20  # bytes: hashing and writing a block takes milliseconds, in which other threads may run Python


def write_hashed(path: Path, *parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file with these bytes, in blocks, and flush it. Return its size and checksum, in a manifest's form."""
    hashed, size = xxh3_128(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in (part for some in parts for part in some):
            for block in _blocks(memoryview(part)):
                hashed.update(block)
                size += len(block)
                while block:
                    block = block[os.write(descriptor, block) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"size": size, "xxh3_128": hashed.hexdigest()}


def _blocks(memory: memoryview) -> Iterator[memoryview]:
    return (memory[first : first + _BLOCK] for first in range(0, len(memory), _BLOCK))


def digest(path: Path) -> dict[str, Any]:
    """Return a file's size and checksum, in a manifest's form. The next block is read while a block is hashed."""
    from concurrent.futures import ThreadPoolExecutor  # takes 7 ms, which a start without a checkpoint saves

    hashed, size = xxh3_128(), 0
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(file.read, _BLOCK)
        while block := ahead.result():
            ahead = reader.submit(file.read, _BLOCK)
            hashed.update(block)
            size += len(block)
    return {"size": size, "xxh3_128": hashed.hexdigest()}
