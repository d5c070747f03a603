"""What the C library does with memory that a process frees."""

import ctypes

from framework.runtime.environment import variables

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Have glibc keep the memory that is freed for what is allocated next. Returns whether it does from now on.

    By itself it gives large blocks back to the kernel, which clears them again, page by page, in each step. Not where the
    user has chosen an allocator, or its settings (LD_PRELOAD, MALLOC_..., GLIBC_TUNABLES), or where the C library is another.
    """
    chosen = any(name in ("LD_PRELOAD", "GLIBC_TUNABLES") or name.startswith("MALLOC_") for name in variables())
    library = ctypes.CDLL(None)
    if chosen or not hasattr(library, "gnu_get_libc_version"):
        return False
    return all([library.mallopt(_M_MMAP_THRESHOLD, 1 << 30), library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)])


def give_back_freed() -> None:
    """Have glibc give back what it keeps of freed memory, in the middle of its heap too. Another C library is left alone."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
