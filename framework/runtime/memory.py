"""How the C library treats memory that a process frees."""

import ctypes

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
