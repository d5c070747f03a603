"""The lock of a run's directory: one launch of a run at a time."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from framework.runtime.exits import RunEnded
from framework.runtime.files import lock_file, make_directory


class RunLocked(RunEnded):
    """Another process works in this directory."""


class Lock:
    """The right to write in a run's directory, held by the process that launched it and by its forked workers.

    A lock of the kernel's (flock): it ends with the last of these processes, however they die, so a stale one cannot
    stand in the way. The file says who holds it. A `party` agrees by other means on which of its processes may write;
    only a lost machine's lock, which a file server may keep for minutes, can then stand in the way, and is passed by.
    """

    def __init__(self, directory: Path, *, party: str | None = None) -> None:
        self.path = directory / "lock"
        self._party = party
        self._descriptor: int | None = None

    def take(self, *, patience_s: float = 10.0, party_patience_s: float = 3.0) -> None:
        """Take the lock, making the directory. RunLocked, at once, if a living process holds it.

        Where the holder itself is dead and its workers are just being taken down, waits `patience_s` for them; for one of
        the same party `party_patience_s`, and then goes on without it.
        """
        make_directory(self.path.parent)
        began = time.monotonic()
        while (descriptor := lock_file(self.path, waits=False)) is None:
            waited, holder = time.monotonic() - began, self.holder()
            if self._party is not None and holder.get("party") == self._party:
                if waited > party_patience_s:
                    self.path.unlink(missing_ok=True)  # its lock is on the file, not on the name
            elif waited > (0.0 if _is_alive(holder) else patience_s):
                raise RunLocked(f"{self.path.parent} is in use by process {holder.get('pid', '?')} on "
                           f"{holder.get('host', 'an unknown host')}; wait for it, or stop it")  # fmt: skip
            time.sleep(0.05)
        os.ftruncate(descriptor, 0)
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "party": self._party}
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        self._descriptor = descriptor

    @property
    def is_held(self) -> bool:
        """Return whether a process, this one included, holds the lock now."""
        try:
            with open(self.path) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def holder(self) -> dict[str, Any]:
        """Return what the file says of the process that took the lock last."""
        try:
            holder = json.loads(self.path.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return holder if isinstance(holder, dict) else {}


def _is_alive(holder: dict[str, Any]) -> bool:
    if holder.get("host") != socket.gethostname():
        return bool(holder)  # on another host: believe the lock
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True
