"""The right to write in a run's directory. It also works if the file system's locks work on one machine only."""

import errno
import fcntl
import itertools
import json
import os
import secrets
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.runtime.exits import Exit, Interrupted, RunEnded
from framework.runtime.files import facts_in, lock_file, make_directory
from framework.runtime.forks import repeating
from framework.runtime.preemption import PREEMPTION

_BEAT_S = 1.0
_PATIENCE_S, _PARTY_PATIENCE_S = 10.0, 3.0  # until the workers of a dead holder have ended
_DEAD_AFTER_S = 4.0  # without a beat; a network file system may show content that is up to 3 s old
_NUM_BYTES = 512  # the fixed size of the file: a file system may also show an old size


class RunLocked(RunEnded):
    """Another process uses this place: a directory or a mirror."""

    def __init__(self, place: Path | str, holder: dict[str, Any]) -> None:
        super().__init__(f"{place} is in use by process {_named(holder)}; wait for it, or stop it")


class Taken(OSError):
    """Another launch has taken the directory, while this launch was frozen or could not reach the directory."""


@dataclass(frozen=True)
class Claim:
    """A launch's claim to a directory. `token` names the holder. A claim without a token cannot be lost."""

    directory: Path
    token: str = ""

    def require(self) -> None:
        """Raise Taken if another launch has the directory now. Call this before a write that would harm the other launch."""
        holder = Lock(self.directory).holder() if self.token else {}
        if holder.get("token", self.token) != self.token:
            raise Taken(errno.ESTALE, f"{self.directory} has been taken by process {_named(holder)}")


def _named(holder: dict[str, Any]) -> str:
    return f"{holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}"


class Lock:
    """The right to write in a run's directory, held by the process that launched the run and by its forked workers.

    It is a lock of the kernel (flock). It ends with the last of these processes, however they die: an old lock cannot block a
    launch. On some file systems (Lustre, NFS, FUSE, each with some options) the lock is valid on one machine only. For this
    case the file also names the holder, and the holder renews the file each second. The processes of one `party` agree by
    other means which of them may write. They ignore the lock of a lost machine, which a file server may keep for minutes.
    """

    def __init__(self, directory: Path, *, party: str | None = None) -> None:
        self.path = directory / "lock"
        self.token = secrets.token_hex(8)
        self._party = party
        self._descriptor: int | None = None
        self._beats = ExitStack()

    def take(self) -> None:
        """Take the lock, and make the directory. Raise RunLocked immediately if a living process holds the lock.

        If the holder is dead and its workers will end soon, wait for the workers. For a process of the same party, wait for a
        shorter time, then continue without its lock. If a holder on another machine has not released the lock, watch the file
        for a few seconds. Raise Interrupted if a signal arrives in the meantime.
        """
        make_directory(self.path.parent)
        began = time.monotonic()
        while (descriptor := lock_file(self.path, waits=False)) is None:
            waited, holder = time.monotonic() - began, self.holder()
            if self._party is not None and holder.get("party") == self._party:
                if waited > _PARTY_PATIENCE_S:
                    self.path.unlink(missing_ok=True)  # the lock belongs to the file, not to the file's name
            elif waited > (0.0 if holder and is_alive(holder) is not False else _PATIENCE_S):
                raise RunLocked(self.path.parent, holder)
            self._wait(0.05)
        try:
            self._watch_holder()
        except RunEnded:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._write(self.token)
        numbers, limit_s = itertools.count(1), 2 * _BEAT_S  # the disk may not answer
        beats = repeating(lambda: self._renew(next(numbers)), every_s=_BEAT_S, name="lock", ends_within_s=limit_s)
        self._beats.enter_context(beats)

    def _watch_holder(self) -> None:
        """Wait until the holder that the file names has ended. Raise RunLocked if it lives, although its lock is free."""
        before, began = self.holder(), time.monotonic()
        if not before.get("token") or (self._party is not None and before.get("party") == self._party):
            return
        while (now := self.holder()) == before and is_alive(before) is not False:
            if time.monotonic() - began > _DEAD_AFTER_S:
                return
            self._wait(0.1)
        if now != before and now.get("token"):
            raise RunLocked(self.path.parent, now)

    @staticmethod
    def _wait(seconds: float) -> None:
        if PREEMPTION.requested:
            raise Interrupted("stopped before the run's directory was free; the same command starts the run")
        time.sleep(seconds)

    def _write(self, token: str, beat: int = 0) -> None:
        holder = {"host": socket.gethostname(), "party": self._party, "token": token, "beat": beat}
        text = json.dumps(holder | {"pid": os.getpid()} | process_identity())
        with open(self.path, "r+b", buffering=0) as file:  # open and close the file, so that a network file system sends it
            file.write(text.encode().ljust(_NUM_BYTES))
            if os.fstat(file.fileno()).st_size > _NUM_BYTES:
                file.truncate(_NUM_BYTES)

    def _renew(self, beat: int) -> None:
        with suppress(OSError):  # a missed beat is not a lost lock
            try:
                Claim(self.path.parent, self.token).require()
            except Taken as taken:
                _end(taken)
            self._write(self.token, beat)

    @property
    def is_held(self) -> bool:
        """Return whether a process, including this one, holds the lock now. For another machine, this is only an estimate."""
        try:
            with open(self.path) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                age_s = time.time() - os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        holder = self.holder()
        return bool(holder.get("token")) and abs(age_s) < _DEAD_AFTER_S and is_alive(holder) is not False

    def release(self) -> None:
        if self._descriptor is not None:
            self._beats.close()
            with suppress(OSError):  # if this fails, the next holder watches the file for a few seconds
                self._write("")
            os.close(self._descriptor)
            self._descriptor = None

    def holder(self) -> dict[str, Any]:
        """Return the file's record of the process that holds the lock, or that was killed while it held the lock."""
        with suppress(OSError):
            return facts_in(self.path.read_bytes())
        return {}


def process_identity(pid: int | None = None) -> dict[str, Any]:
    """Return the facts that identify a process (default: this process): machine, container, process id, and start time."""
    pid = os.getpid() if pid is None else pid
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as stat, open("/proc/sys/kernel/random/boot_id") as boot:
        state, *fields = stat.read().rpartition(")")[2].split()
        is_there = state not in ("Z", "X")  # false: the process has ended, but its parent has not waited for it yet
        where = {"pid": pid, "boot": boot.read().strip(), "container": os.readlink("/proc/self/ns/pid")}
        return where | {"started": fields[18]} if is_there else {}
    return {} if os.path.exists("/proc/self") else _identity_elsewhere(pid)


def _identity_elsewhere(pid: int) -> dict[str, Any]:
    """Return the same on a system without /proc, which has no containers. After a boot, no process has the same start."""
    import uuid

    import psutil

    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return {"pid": pid, "boot": f"{uuid.getnode():x}", "container": "", "started": str(process.create_time())}
    return {}


def is_alive(holder: dict[str, Any]) -> bool | None:
    """Return whether the holder lives; None if it was no process of this machine and this container: nobody here knows."""
    here = process_identity()
    if not here or any(holder.get(key) != here[key] for key in ("boot", "container")):
        return None
    there = process_identity(holder["pid"]) if isinstance(holder.get("pid"), int) else {}
    return there.get("started") == holder.get("started")


def _end(taken: Taken) -> None:
    """End this process, and thus its workers, before they write anything more into the directory of another run."""
    with suppress(OSError):
        sys.stderr.write(f"{taken.strerror}; this command stops, and writes nothing more\n")
        sys.stderr.flush()
    os._exit(Exit.FAILED)
