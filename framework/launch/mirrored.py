"""A thread that keeps a run's mirror up to date while the run works. The store may be slow or fail: training continues."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from framework.config.schema import RunSection
from framework.runs.directory import RunDirectory
from framework.runs.mirror import Mirror, MirrorTaken
from framework.runtime import log
from framework.runtime.exits import Exit, RunEnded
from framework.runtime.lock import Lock
from framework.runtime.log import LOGGER
from framework.runtime.objects import Objects, StoreFailed
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem

_POLL_S = 1.0  # between checks for a new checkpoint
_LONGEST_PAUSE_S = 60.0  # between attempts while the store fails
_PATIENCE_S = 30.0  # the total of the pauses at the run's end, if the store fails

Settle = Callable[[int], int]  # from the exit code of a run's work to the exit code of the command


def mirror_of(run: RunSection, *, name: str) -> Mirror | None:
    """Return the run's mirror, or None if it has none. Raise StoreFailed if the mirror cannot be opened."""
    return Mirror(f"{run.mirror.rstrip('/')}/{name}/{run.id}", RunDirectory(Path(run.dir))) if run.mirror else None


def refused(failure: StoreFailed) -> Problem:
    """Return a store's failure, before the start, as a problem."""
    if failure.is_wrong:
        return Problem("run.mirror", str(failure), "a place that exists, and the right to list, read and write there")
    return Problem("run.mirror", str(failure), "the same command tries again", code=Exit.DISK)


@contextmanager
def mirrored(mirror: Mirror, *, grace_s: float | None) -> Iterator[Settle]:
    """Upload each new checkpoint of a run while the run works. Yield a function for the end of the work.

    This function uploads the missing files. It returns DISK if the upload fails and nothing else has failed.
    """
    mirror.objects = Objects(mirror.url)  # a signal stops the run, not the upload
    is_over, taken = threading.Event(), list[MirrorTaken]()
    thread = threading.Thread(target=_upload, args=(mirror, is_over, taken), name="mirror", daemon=True)
    thread.start()

    def settle(code: int) -> int:
        is_over.set()
        thread.join(None if grace_s is None or not PREEMPTION.requested else max(0.0, PREEMPTION.left_of(grace_s)))
        missing = ", ".join(mirror.missing)
        with log.log_file(mirror.directory.log, who="mirror"):
            if taken:
                LOGGER.error("%s", taken[0])
                return Exit.FAILED
            if missing:
                LOGGER.error("%s lacks %s; the same command uploads it", mirror.url, missing)
        return Exit.DISK if missing and code in (Exit.FINISHED, Exit.PREEMPTED) else code

    try:
        yield settle
    except BaseException:
        settle(Exit.FAILED)
        raise


def _upload(mirror: Mirror, is_over: threading.Event, taken: list[MirrorTaken]) -> None:
    """Upload new checkpoints until the run's end, then all that is missing. If the store fails, try again after a pause."""
    pause_s, paused_s = 1.0, 0.0
    while True:
        is_last = is_over.is_set()
        try:
            mirror.sync(is_last=is_last)
            pause_s = 1.0
            if is_last:
                return
            is_over.wait(_POLL_S)
        except MirrorTaken as error:
            taken.append(error)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        except OSError as failure:
            if is_last and paused_s >= _PATIENCE_S:
                return
            with log.log_file(mirror.directory.log, who="mirror"):
                LOGGER.warning("%s; training continues, and the upload is tried again in %.0f s", failure, pause_s)
            time.sleep(pause_s) if is_last else is_over.wait(pause_s)
            paused_s, pause_s = paused_s + is_last * pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)


def put_missing(run: RunSection, *, name: str) -> int:
    """Upload what the mirror lacks of a finished run. Return the exit code."""
    if run.mirror is None:
        return Exit.FINISHED
    lock = Lock(Path(run.dir))
    try:
        lock.take()
        mirror = mirror_of(run, name=name)
        assert mirror is not None
        if mirror.is_another_start():
            LOGGER.warning("%s holds a later start of this run, and stays unchanged", mirror.url)
            return Exit.FINISHED
        if mirror.is_finished:
            return Exit.FINISHED
        mirror.take()
        with mirrored(mirror, grace_s=None) as settle:
            return settle(Exit.FINISHED)
    except StoreFailed as failure:
        LOGGER.error("%s", refused(failure))
        return Exit.DISK
    except RunEnded as end:
        LOGGER.error("%s", end)
        return end.code
    finally:
        lock.release()
