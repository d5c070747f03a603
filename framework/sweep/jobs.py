"""The jobs of a sweep: what one is, and several at a time, each in a process forked from this one."""

import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from framework.cli.run import start
from framework.config.schema import RunConfig
from framework.runs.directory import RunDirectory
from framework.runs.table import TableRow
from framework.runtime.exits import Exit
from framework.runtime.parent_death import die_with_parent
from framework.runtime.preemption import PREEMPTION, SIGNALS
from framework.sweep.line import Values


@dataclass(eq=False)
class Job:
    """One run of a sweep: its command line, what that composes to, and how it has ended."""

    values: Values
    line: list[str]
    config: RunConfig
    code: int | None = None  # None: it has not run, or has not ended

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(Path(self.config.run.dir))

    @property
    def is_done(self) -> bool:
        return self.directory.is_finished and self.config.run.resume != "never"

    def row(self, *, state: str | None = None) -> TableRow:
        """Return how the job stands."""
        return TableRow.read(self.config.run, self.config.checkpoint.monitor, self.values, state=state, code=self.code)

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items()) or " ".join(self.line)


class Pool:
    """Runs jobs, at most `size` at a time. The PREEMPTION of this process passes a signal on to all of them.

    What a job leaves in its process (memory, CUDA, threads of OpenMP) is gone with it; one that is killed takes no other
    with it; and none outlives this process. Each is a part of `group`, unless its line names another. With more than one at
    a time, each has its share of the CPUs, and its console goes into `logs`.
    """

    def __init__(self, *, size: int, logs: Path, group: str) -> None:
        self.size = size
        self._group = group
        self._logs = logs if size > 1 else None
        cpus = sorted(os.sched_getaffinity(0))
        self._shares = [set(cpus[n::size] or cpus[n % len(cpus) :][:1]) for n in range(size)]  # of those who may start
        self._running: dict[BaseProcess, tuple[Job, set[int]]] = {}

    @property
    def has_room(self) -> bool:
        return bool(self._shares)

    @property
    def running(self) -> list[Job]:
        return [job for job, _ in self._running.values()]

    def start(self, job: Job) -> None:
        import matplotlib.figure  # noqa: F401  # once, for all jobs

        import framework.launch.worker  # noqa: F401

        share = self._shares.pop(0)
        log = self._logs / f"{job.config.run.id}.log" if self._logs is not None else None
        line = [*job.line, *([f"run.group={self._group}"] if job.config.run.group is None else [])]
        process = multiprocessing.get_context("fork").Process(target=_run, args=(line, share, log))
        sys.stdout.flush()
        # until the child can note it, and this process pass it on, a signal waits
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
            self._running[process] = (job, share)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self, job: Job) -> None:
        """Have a job save a checkpoint and end."""
        next(process for process, (other, _) in self._running.items() if other is job).terminate()

    def wait(self, *, timeout_s: float) -> list[Job]:
        """Wait until a job ends, or for `timeout_s`. Returns those that have ended, with their exit codes."""
        wait([process.sentinel for process in self._running], timeout_s)
        ended = []
        for process, (job, share) in list(self._running.items()):
            if process.exitcode is not None:
                job.code = process.exitcode if process.exitcode >= 0 else 128 - process.exitcode
                ended.append(job)
                del self._running[process]
                self._shares.append(share)
        return ended


def _run(line: list[str], share: set[int], log: Path | None) -> None:
    die_with_parent()
    PREEMPTION.speaks = False
    PREEMPTION.watch()  # a signal that came just before the fork is in it
    if log is not None:
        import torch

        os.sched_setaffinity(0, share)
        torch.set_num_threads(min(torch.get_num_threads(), len(share)))
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    code = start(line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_code(codes: list[int]) -> int:
    """Return a sweep's exit code: 75 if a job was preempted, else the failed jobs' if they have one in common, else 1."""
    failed = set(codes) - {Exit.FINISHED, Exit.PREEMPTED}
    if Exit.PREEMPTED in codes:
        return Exit.PREEMPTED
    return Exit.FINISHED if not failed else failed.pop() if len(failed) == 1 else Exit.FAILED
