"""Python as on a Mac, for a process without /proc (tests/test_mac.py): what only Linux has is missing, and psutil sees processes.

Python imports this file when it starts. `fcntl.F_GETPATH` and /dev/fd are what a Mac has in the place of /proc/self/fd.
"""

import ctypes
import fcntl
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

HIDDEN = "/mnt/proc"  # where the real /proc is
_MISSING = ("prctl", "tgkill", "mallopt", "gnu_get_libc_version")  # in the C library


class _Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if self._name is None and name in _MISSING:
            raise AttributeError(name)
        return super().__getattr__(name)


def _fcntl(descriptor: Any, command: int, argument: Any = 0) -> Any:
    if command == fcntl.F_GETPATH:  # type: ignore[attr-defined]  # set below
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        return os.readlink(f"{HIDDEN}/self/fd/{number}").encode().ljust(len(argument), b"\0")
    return _FCNTL(descriptor, command, argument)


if not os.path.exists("/proc/self"):
    _FCNTL = fcntl.fcntl
    fcntl.F_GETPATH, fcntl.fcntl = 50, _fcntl  # type: ignore[attr-defined]
    ctypes.CDLL = _Library  # type: ignore[misc]
    for owner, names in ((os, ("sched_getaffinity", "sched_setaffinity")), (signal, ("SIGRTMIN", "SIGRTMAX"))):
        for name in names:
            delattr(owner, name)
    import psutil

    psutil.PROCFS_PATH = HIDDEN
runpy.run_path(str(Path(__file__).parent.parent / "machine" / "sitecustomize.py"))
assert sys.platform == "linux"
