"""The commands that share a search. The lock of each command shows that it is alive; one command claims each trial."""

import itertools
import os
import secrets
import shutil
import socket
from contextlib import AbstractContextManager
from pathlib import Path

from framework.runtime.files import locked
from framework.runtime.lock import Lock, RunLocked


class Worker:
    """One command of a shared search. Claims of a trial are numbered, and the last claim counts.

    A claim is a symbolic link to the name of the worker. Even network file systems create such a link only once.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "workers"
        self._name = f"{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(4)}"
        self._lock = Lock(self._folder / self._name)

    def take(self) -> None:
        """Become a worker, until this process and its jobs end."""
        self._lock.take()

    def release(self) -> None:
        self._lock.release()
        shutil.rmtree(self._folder / self._name, ignore_errors=True)

    def alone(self) -> AbstractContextManager[None]:
        """Exclude other workers, as far as the file system's locks work: two workers must not create a database together."""
        return locked(self._folder / "lock")

    def claim(self, trial: int) -> bool:
        """Claim a trial by its number. Return whether this worker gets it. It does not if a living worker has it."""
        next_claim = next(path for n in itertools.count() if not os.path.lexists(path := self._folder / f"{trial}.{n}"))
        number = int(next_claim.suffix[1:])
        if number and self._is_alive(os.readlink(self._folder / f"{trial}.{number - 1}")):
            return False
        try:
            os.symlink(self._name, next_claim)
        except FileExistsError:  # another worker was faster
            return False
        return True

    def _is_alive(self, name: str) -> bool:
        lock = Lock(self._folder / name)
        if not lock.path.exists():
            return False
        try:
            lock.take(patience_s=_PATIENCE_S)
        except RunLocked:
            return True
        lock.release()
        return False


_PATIENCE_S = 2.0  # for the jobs of a killed command
