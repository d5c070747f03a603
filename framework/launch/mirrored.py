"""A process beside a run that keeps its mirror up to date. It may be slow, or the store may fail: training continues."""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from framework.config.schema import RunSection
from framework.runs.directory import RunDirectory
from framework.runs.mirror import Holding, Mirror
from framework.runs.mirror_upload import MirrorTaken, Upload
from framework.runtime import log
from framework.runtime.exits import Exit, RunEnded
from framework.runtime.lock import Lock
from framework.runtime.log import LOGGER
from framework.runtime.objects import Objects, StoreFailed
from framework.runtime.preemption import PREEMPTION, die_with_parent
from framework.runtime.problem import Problem

_POLL_S = 1.0  # between checks for a new checkpoint
_LONGEST_PAUSE_S = 60.0  # between attempts while the store fails
_PATIENCE_S = 30.0  # the total of the pauses at the run's end, if the store fails


def mirror_of(run: RunSection, *, name: str) -> Mirror | None:
    """Return the run's mirror, or None if it has none. Raise StoreFailed if the mirror cannot be opened."""
    return Mirror(f"{run.mirror.rstrip('/')}/{name}/{run.id}", RunDirectory(Path(run.dir))) if run.mirror else None


def refused(failure: StoreFailed) -> Problem:
    """Return a store's failure, before the start, as a problem."""
    if failure.is_wrong:
        return Problem("run.mirror", str(failure), "a place that exists, and the right to list, read and write there")
    return Problem("run.mirror", str(failure), "the same command tries again", code=Exit.DISK)


Settle = Callable[[int], int]  # from the exit code of a run's work to the exit code of the command


@contextmanager
def mirrored(mirror: Mirror, holding: Holding, *, grace_s: float | None) -> Iterator[Settle]:
    """Keep the mirror up to date, in another process, while a run does its work. Yield a function for the end of the work.

    This function uploads the missing files. It returns DISK if the upload fails and nothing else has failed.
    """
    follower = _Follower(mirror, holding)

    def settle(code: int) -> int:
        is_taken, missing = follower.finish(within_s=math.inf if grace_s is None else PREEMPTION.left_of(grace_s))
        with log.log_file(mirror.directory.log):
            if is_taken:
                LOGGER.error("%s has been taken by another command; this command stops, and writes nothing more there",
                             mirror.url)  # fmt: skip
                return Exit.FAILED
            if missing:
                LOGGER.error("%s lacks %s; the same command uploads it", mirror.url, missing)
        return Exit.DISK if missing and code in (Exit.FINISHED, Exit.PREEMPTED) else code

    try:
        yield settle
    except BaseException:
        settle(Exit.FAILED)
        raise


def put_missing(run: RunSection, *, name: str) -> int:
    """Upload what the mirror lacks of a finished run. Return the exit code."""
    lock = Lock(Path(run.dir))
    try:
        mirror = mirror_of(run, name=name)
        if mirror is None or mirror.is_complete(contents := mirror.look()):
            return Exit.FINISHED
        lock.take()
        if mirror.is_another(contents):
            LOGGER.warning("%s holds a later start of this run, and stays unchanged", mirror.url)
            return Exit.FINISHED
        mirror.require_free(contents)
        with mirrored(mirror, mirror.take(contents), grace_s=None) as settle:
            return settle(Exit.FINISHED)
    except StoreFailed as failure:
        LOGGER.error("%s", refused(failure))
        return Exit.DISK
    except RunEnded as end:
        LOGGER.error("%s", end)
        return end.code
    finally:
        lock.release()


_TAKEN = "taken"


class _Follower:
    """The process that uploads. It ends when this process ends, however this process ends."""

    def __init__(self, mirror: Mirror, holding: Holding) -> None:
        self._mirror, self._holding = mirror, holding
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_follow, args=(theirs, self._connection, self._mirror, self._holding))
        self._process.start()
        theirs.close()

    def finish(self, *, within_s: float) -> tuple[bool, str]:
        """Wait until all is uploaded, and end. Return whether another command has taken the mirror, and what is missing."""
        missing = f"the files that were not uploaded within {within_s:.0f} s"
        try:
            for _ in range(2):  # a second time if the process was killed
                try:
                    self._connection.send(None)
                    if self._connection.poll(None if within_s == math.inf else max(0.0, within_s)):
                        missing = self._connection.recv()
                    break
                except (EOFError, OSError):
                    missing = "the files that its killed process had not uploaded"
                    self._process.join()
                    self._start()
        finally:
            self._process.kill()
            self._process.join()
        return missing == _TAKEN, missing


def _follow(connection: Connection, parents: Connection, mirror: Mirror, holding: Holding) -> NoReturn:
    """Be the process: upload new files until the parent reports that the run has ended."""
    try:
        die_with_parent()
        parents.close()
        os.setpgid(0, 0)  # signals from a terminal or a scheduler to the run's processes do not reach this process
        PREEMPTION.ignore()
        os.nice(10)
        log.start_console(rank=0, who="mirror")
        with log.log_file(mirror.directory.log, who="mirror"):
            connection.send(_put_all(connection, mirror, holding))
    except BaseException as error:
        LOGGER.error("the process of the mirror failed: %s", " ".join(str(error).split()) or type(error).__name__)
    finally:
        os._exit(0)


def _put_all(connection: Connection, mirror: Mirror, holding: Holding) -> str:
    """Upload new files until the end, then the missing files. Return what is still missing, or an empty text."""
    upload = Upload(Objects(mirror.url), mirror.directory, holding)
    next_at, pause_s = 0.0, 1.0
    try:
        with upload.signs() as is_taken:
            while not connection.poll(_POLL_S):
                if is_taken.is_set():
                    raise MirrorTaken
                if time.monotonic() < next_at:
                    continue
                try:
                    upload.sync()
                    pause_s = 1.0
                except OSError as failure:
                    LOGGER.warning("%s; training continues, and the upload is tried again in %.0f s", failure, pause_s)
                    next_at, pause_s = time.monotonic() + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)
            connection.recv()
            _put_last(upload)
        missing = ", ".join(upload.missing)
        with suppress(StoreFailed):
            upload.release(is_complete=not missing)
        return missing
    except MirrorTaken:
        os.kill(os.getppid(), signal.SIGTERM)
        return _TAKEN


def _put_last(upload: Upload) -> None:
    """Upload the missing files at the run's end. If the store fails, try again until the pauses reach their limit."""
    paused_s, pause_s = 0.0, 1.0
    while True:
        try:
            upload.sync(is_last=True)
            return
        except OSError as failure:
            if paused_s >= _PATIENCE_S:
                LOGGER.warning("%s", failure)
                return
        time.sleep(pause_s)
        paused_s, pause_s = paused_s + pause_s, 2 * pause_s
