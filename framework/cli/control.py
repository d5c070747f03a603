"""mode=cancel: stop waiting and running runs, with a checkpoint."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from framework.config.modes import Command
from framework.runs.directory import RunDirectory
from framework.runs.status import queued_jobs
from framework.runtime import slurm
from framework.runtime.exits import Exit
from framework.runtime.lock import Lock, is_alive
from framework.runtime.log import LOGGER
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
        places = [*map(str, list(found)[:3]), *(["..."] if len(found) > 3 else [])]
        LOGGER.info("nothing to cancel: no job or process waits or runs for %s", ", ".join(places) or "these jobs")
    return Exit.FAILED if elsewhere else Exit.FINISHED
