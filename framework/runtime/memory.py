"""The CPUs and the memory that a process may use, and how the C library treats memory that a process frees."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from framework.runtime.environment import variables

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next allocations. Return whether glibc does so from now on.

    By default, glibc returns large blocks to the kernel, and the kernel clears them again, page by page, in each step. Nothing
    changes if the user has chosen an allocator or its settings (LD_PRELOAD, MALLOC_..., GLIBC_TUNABLES), or if the C library
    is not glibc.
    """
    chosen = any(name in ("LD_PRELOAD", "GLIBC_TUNABLES") or name.startswith("MALLOC_") for name in variables())
    library = ctypes.CDLL(None)
    if chosen or not hasattr(library, "gnu_get_libc_version"):
        return False
    return all([library.mallopt(_M_MMAP_THRESHOLD, 1 << 30), library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)])


def cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may use."""
    may_use = getattr(os, "sched_getaffinity", None)  # Linux has it
    return sorted(may_use(0)) if may_use is not None else list(range(os.cpu_count() or 1))


def machine_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory of this machine, or of this process's control group (a container, a job) if it has fewer."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *(limit for limit, _ in _limits(root))])


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that processes can still get, with those that the kernel's file cache would free."""
    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _limits(root))])


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group above this process, and the bytes in use without the file cache.

    Sources: the kernel's cgroup-v2.rst, section Memory Interface Files, and cgroup-v1/memory.rst, section 5.2.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, kinds, path in (line.split(":", 2) for line in lines):
        if kinds not in ("", "memory"):
            continue
        top, limit, current, cache = (
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if kinds
            else ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
        )
        own = Path(path.lstrip("/"))
        for folder in (root / top / part for part in (own, *own.parents)):
            try:
                text, used = (folder / limit).read_text().strip(), int((folder / current).read_text())
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except OSError:  # a container may not see the groups above its own
                continue
            if text != "max":
                yield int(text), used - int(counts.get(cache, 0))
