"""The modes for active runs: cancel stops them with a checkpoint, follow prints a run's log while it grows."""

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from framework.config.modes import Command
from framework.launch.claim import print_problems
from framework.runs.directory import RunDirectory
from framework.runs.status import Standing, queued_jobs, standings
from framework.runtime import slurm
from framework.runtime.exits import Exit
from framework.runtime.lock import Lock, is_alive
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem
from framework.runtime.slurm import SlurmFailed


def cancel_run(command: Command) -> Exit:
    return cancel([RunDirectory(Path(command.config.run.dir))])


def cancel(directories: Iterable[RunDirectory]) -> Exit:
    """Stop waiting and running runs, which are Slurm jobs or processes of this machine. A running run saves a checkpoint.

    The same command without mode=cancel continues the run.
    """
    found = {part.path: part for directory in directories for part in (directory, *directory.beside())}
    try:
        jobs = queued_jobs(found.values())
        if jobs:
            slurm.ask("scancel", *(job.job_id for job in jobs.values()))
    except SlurmFailed as error:
        LOGGER.error("not cancelled: %s; the same command tries again", error)
        return Exit.PREEMPTED
    running = {path: Lock(path).holder() for path in found if path not in jobs and Lock(path).is_held}
    for path, job in jobs.items():
        if job.waits:
            found[path].update_summary(status="cancelled")
        LOGGER.info("job %s %s: %s", job.job_id, "is cancelled" if job.waits else "stops, with a checkpoint", path)
    elsewhere = [path for path, holder in running.items() if not is_alive(holder)]
    for path, holder in running.items():
        if path in elsewhere:
            LOGGER.error("process %s runs on %s, and must be stopped there: %s", holder.get("pid"), holder.get("host"), path)
        else:
            os.kill(holder["pid"], signal.SIGTERM)
            LOGGER.info("process %s stops, with a checkpoint: %s", holder["pid"], path)
    if not jobs and not running:
        LOGGER.info("nothing to cancel: no job or process of the run is waiting or running")
    return Exit.FAILED if elsewhere else Exit.FINISHED


# --- follow

_POLL_S = 0.5
_ASK_EVERY_S = 5.0  # how often to ask Slurm: all users share its controller
_FIRST_BYTES = 2000  # of the earlier log
_ENDS = {"finished": Exit.FINISHED, "failed": Exit.FAILED}


def follow_run(command: Command) -> Exit:
    """Print a run's log until the run has ended, or until Ctrl-C. Return 0 if it has finished, 1 if it has failed, else 75."""
    directory = RunDirectory(Path(command.config.run.dir))
    PREEMPTION.speaks = False
    printed, asked_at, found = _Printed(directory.log), 0.0, Standing("running")
    while found.state in ("running", "queued", "?") and not PREEMPTION.requested:
        time.sleep(_POLL_S)
        if time.monotonic() - asked_at > _ASK_EVERY_S:
            before, found, asked_at = found, standings([directory])[directory.path], time.monotonic()
            if found.state == "queued" != before.state:
                LOGGER.info("job %s waits", directory.job_id)
        printed.more()
    if found.state == "missing":
        return print_problems([Problem("run.dir", f"there is no run in {directory.path}", "start the run first")])
    why = f" ({found.why})" if found.why else ""
    LOGGER.info("%s, at step %s: %s%s", found.state, directory.read_summary().get("step", 0), directory.path, why)
    return Exit.FINISHED if PREEMPTION.requested else _ENDS.get(found.state, Exit.PREEMPTED)


class _Printed:
    """The printed part of a file that grows, or that is replaced. Of its earlier content, only the end is printed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0
        if path.is_file():
            self._inode, size = path.stat().st_ino, path.stat().st_size
            self._offset = max(0, size - _FIRST_BYTES)

    def more(self) -> None:
        """Print the new content."""
        if not self._path.is_file():
            return
        with open(self._path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()
