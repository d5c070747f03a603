"""Where the jobs of a sweep run: several at a time, each in a process that is forked from this process, or as Slurm jobs."""

import multiprocessing
import os
import secrets
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from framework.cli.run import start
from framework.config.draft import Draft
from framework.launch.slurm import submit
from framework.runs.facts import be_brief
from framework.runs.status import queued_jobs
from framework.runtime import slurm
from framework.runtime.exits import Exit
from framework.runtime.forks import begin_child
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION, SIGNALS
from framework.runtime.slurm import SlurmFailed
from framework.sweep.jobs import Job, alike_jobs


class Pool:
    """A pool that runs at most `size` jobs at a time. PREEMPTION of this process sends a signal on to all jobs.

    A job's memory, CUDA context and OpenMP threads end with its process. A killed job ends no other job, and no job lives
    longer than this process. Each job belongs to `group`, unless its line names another group. With more than one job at a
    time, each job has its share of the CPUs, and writes its console output into `logs`.
    """

    def __init__(self, *, size: int, logs: Path, group: str, rehearsed: set[str]) -> None:
        self.size, self._group, self._rehearsed = size, group, rehearsed
        self._logs = logs if size > 1 else None
        cpus = sorted(os.sched_getaffinity(0))
        self._shares = [set(cpus[n::size] or cpus[n % len(cpus) :][:1]) for n in range(size)]  # for the jobs that can start
        self._running: dict[BaseProcess, tuple[Job, set[int]]] = {}
        # a thread that never computes (framework.runtime.forks.in_new_thread) and lives as long as the jobs, which die with it
        self._forks = ThreadPoolExecutor(1)

    @property
    def room(self) -> int:
        """The number of jobs that can start now."""
        return len(self._shares)

    @property
    def running(self) -> list[Job]:
        return [job for job, _ in self._running.values()]

    def start(self, jobs: list[Job]) -> None:
        """Start jobs. There must be room for them."""
        for job in jobs:
            self._start(job)

    def _start(self, job: Job) -> None:
        import matplotlib.figure  # noqa: F401  # once, for all jobs

        import framework.launch.worker  # noqa: F401
        from framework.preflight.rehearsal import subject

        share = self._shares.pop(0)
        log = self._logs / f"{job.config.run.id}.log" if self._logs is not None else None
        checked, is_rehearsed = Draft(dict(job.config.in_group(self._group)), []), subject(job.build) in self._rehearsed
        process = multiprocessing.get_context("fork").Process(target=_run, args=(job.line, checked, is_rehearsed, share, log))
        sys.stdout.flush()
        # a signal waits until the child can record it, and this process can send it on
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._forks.submit(process.start).result()
            self._running[process] = (job, share)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self, job: Job) -> None:
        """Make a job save a checkpoint and end."""
        next(process for process, (other, _) in self._running.items() if other is job).terminate()

    def wait(self, *, timeout_s: float) -> list[Job]:
        """Wait until a job ends, but at most `timeout_s`. Return the jobs that have ended, with their exit codes."""
        from framework.preflight.rehearsal import subject

        wait([process.sentinel for process in self._running], timeout_s)
        ended = []
        for process, (job, share) in list(self._running.items()):
            if process.exitcode is not None:
                job.code = process.exitcode if process.exitcode >= 0 else 128 - process.exitcode
                self._rehearsed |= {subject(job.build)} if job.code == Exit.FINISHED else set()
                ended.append(job)
                del self._running[process]
                self._shares.append(share)
        return ended


def _run(line: list[str], checked: Draft, is_rehearsed: bool, share: set[int], log: Path | None) -> None:
    begin_child()
    PREEMPTION.speaks = False
    be_brief()
    PREEMPTION.watch()  # it receives a signal that came just before the fork
    if log is not None:
        import torch

        os.sched_setaffinity(0, share)
        torch.set_num_threads(min(torch.get_num_threads(), len(share)))
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    code = start(line, checked=checked, is_rehearsed=is_rehearsed)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# --- as Slurm jobs

_LARGEST_ARRAY = 500  # each job's lock is an open file


def submit_all(jobs: list[Job], *, directory: Path, group: str) -> None:
    """Submit jobs that are not in Slurm's queue. The code of a job is then the code of its submission.

    Jobs with equal requests become an array. `directory` is the sweep's directory.
    """
    for alike in alike_jobs(jobs):
        for first in range(0, len(alike), _LARGEST_ARRAY):
            part = alike[first : first + _LARGEST_ARRAY]
            folder, name = part[0].directory.path / "slurm", None
            if len(part) > 1:
                folder = directory / "slurm" / secrets.token_hex(4)
                name = f"{part[0].config.name}/{directory.name}"
            codes = submit([job.config.in_group(group) for job in part], folder=folder, name=name)
            for job, code in zip(part, codes):
                job.code = Exit.PREEMPTED if code == Exit.FAILED else code  # FAILED: its directory is in use


class SlurmPool:
    """A `Pool` of Slurm jobs. They live longer than this process; the same command finds them again."""

    def __init__(self, *, size: int, group: str, directory: Path) -> None:
        self.size, self._group, self._directory = size, group, directory
        self._running: list[Job] = []
        self._refused: list[Job] = []  # refused by Slurm: submitted again when another job has ended
        self._looks_at = 0.0  # in time.monotonic's seconds

    @property
    def room(self) -> int:
        """The number of jobs that can start now."""
        return 0 if self._refused else self.size - len(self._running)

    @property
    def running(self) -> list[Job]:
        return self._running + self._refused

    def start(self, jobs: list[Job]) -> None:
        """Submit the jobs, unless they already wait or run."""
        submit_all(jobs, directory=self._directory, group=self._group)
        for job in jobs:
            (self._running if job.code == Exit.FINISHED else self._refused).append(job)

    def stop(self, job: Job) -> None:
        """Make a job save a checkpoint and end."""
        try:
            slurm.ask("scancel", job.directory.job_id or "")
        except SlurmFailed as error:
            LOGGER.warning("%s: %s", job, error)

    def wait(self, *, timeout_s: float) -> list[Job]:
        """Wait until a job ends, but at most `timeout_s`. Return the jobs that have ended, with their exit codes.

        If this process has received a signal to stop, it no longer waits for jobs.
        """
        if PREEMPTION.requested:
            self._running, self._refused = [], []
            return []
        if time.monotonic() < self._looks_at:
            time.sleep(timeout_s)
            return []
        self._looks_at = time.monotonic() + _PAUSE_S
        try:
            in_queue = queued_jobs(job.directory for job in self._running)
        except SlurmFailed as error:
            LOGGER.warning("Slurm does not answer: %s", error)
            return []
        ended = [job for job in self._running if job.directory.path not in in_queue]
        self._running = [job for job in self._running if job not in ended]
        for job in ended:
            job.code = _CODES.get(job.directory.state, Exit.FAILED)
        if ended or not self._running:
            refused, self._refused = self._refused, []
            self.start(refused)
        if not self._running:  # no running job remains to wait for
            ended, self._refused = ended + self._refused, []
        return ended


_PAUSE_S = 2.0  # between two requests to the controller, which all users share
_CODES = {"finished": Exit.FINISHED, "preempted": Exit.PREEMPTED,
          "cancelled": Exit.PREEMPTED, "queued": Exit.PREEMPTED}  # queued: it left the queue before it began  # fmt: skip
