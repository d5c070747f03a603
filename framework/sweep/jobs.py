"""The jobs of a sweep: several at a time, each in a process that is forked from this process, or as Slurm jobs."""

import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from framework.cli.run import start
from framework.config.draft import Draft
from framework.config.frozen_file import digest_of
from framework.config.schema import RunConfig
from framework.launch.claim import accept_code
from framework.launch.mirrored import put_missing
from framework.launch.slurm import submit
from framework.preflight.check import changed_code
from framework.preflight.slurm import JobRequest, job_problems
from framework.runs.directory import RunDirectory
from framework.runs.facts import be_brief
from framework.runs.provenance import WAYS
from framework.runs.status import queued_jobs
from framework.runs.table import TableRow
from framework.runtime import slurm
from framework.runtime.exits import Exit
from framework.runtime.forks import begin_child
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION, SIGNALS
from framework.runtime.problem import Problem
from framework.runtime.slurm import SlurmFailed
from framework.sweep.space import Values


@dataclass(eq=False)
class Job:
    """One run of a sweep: its command line, its configuration, and its exit code."""

    values: Values
    line: list[str]
    config: RunConfig
    code: int | None = None  # None: it has not run or not ended

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(Path(self.config.run.dir))

    @property
    def is_done(self) -> bool:
        return self.directory.is_finished and self.config.run.resume != "never"

    @property
    def stale_code(self) -> str:
        """The unaccepted changes of the code since the job's last start. Empty if there are none."""
        return "; ".join(changed_code(self.config.run, self.config.targets()))

    def skip(self) -> None:
        """Treat a finished job as a job that has run, after its mirror got what was missing."""
        config = self.config
        accept_code(config.run, config.targets())
        self.code = put_missing(config.run, name=config.name)
        LOGGER.info("finished already: %s, in %s", self, self.directory.path)

    def row(self, *, state: str | None = None) -> TableRow:
        """Return the job's state. It is `stale` if the job started with other code."""
        state = "stale" if self.code is None and self.stale_code else state
        return TableRow.read(self.config.run, self.config.checkpoint.monitor, self.values, state=state, code=self.code)

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items()) or " ".join(self.line)


class Pool:
    """A pool that runs at most `size` jobs at a time. PREEMPTION of this process sends a signal on to all jobs.

    A job's memory, CUDA context and OpenMP threads end with its process. A killed job ends no other job, and no job lives
    longer than this process. Each job belongs to `group`, unless its line names another group. With more than one job at a
    time, each job has its share of the CPUs, and writes its console output into `logs`.
    """

    def __init__(self, *, size: int, logs: Path, group: str) -> None:
        self.size, self._group = size, group
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

        share = self._shares.pop(0)
        log = self._logs / f"{job.config.run.id}.log" if self._logs is not None else None
        line = [*job.line, *([f"run.group={self._group}"] if job.config.run.group is None else [])]
        process = multiprocessing.get_context("fork").Process(target=_run, args=(line, share, log))
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
    code = start(line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_code(codes: list[int]) -> int:
    """Return a sweep's exit code: 75 if a job was preempted, else the common code of all failed jobs, else 1."""
    failed = set(codes) - {Exit.FINISHED, Exit.PREEMPTED}
    if Exit.PREEMPTED in codes:
        return Exit.PREEMPTED
    return Exit.FINISHED if not failed else failed.pop() if len(failed) == 1 else Exit.FAILED


# --- as Slurm jobs

_LARGEST_ARRAY = 500  # each job's lock is an open file


def problems_of(jobs: list[Job]) -> list[Problem]:
    """Return the problems that torch or Slurm finds with any unfinished job, or a problem if jobs are stale."""
    if stale := [job for job in jobs if job.stale_code]:
        what = f"{len(stale)} of {len(jobs)} runs of this sweep started with other code: {stale[0].stale_code}"
        return [Problem("run.code", what, WAYS)]
    left = [job for job in jobs if not job.is_done]
    if not left:
        return []
    from framework.preflight.child import problems_in_child
    from framework.preflight.dry_build import dry_build  # imports torch, which a finished sweep does not need

    found = [problem for job in left for problem in problems_in_child(partial(dry_build, job.config))]
    is_submitted = not found and left[0].config.launch.kind == "slurm"
    for alike in _alike(left) if is_submitted else []:
        draft = Draft(dict(alike[0].config), [])
        draft.check(job_problems)
        found += draft.problems
    return list(dict.fromkeys(found))


def submit_all(jobs: list[Job], *, directory: Path, group: str) -> None:
    """Submit jobs that are not in Slurm's queue. The code of a job is then the code of its submission.

    Jobs with equal requests become an array. `directory` is the sweep's directory.
    """
    for alike in _alike(jobs):
        for first in range(0, len(alike), _LARGEST_ARRAY):
            part = alike[first : first + _LARGEST_ARRAY]
            folder, name = part[0].directory.path / "slurm", None
            if len(part) > 1:
                folder = directory / "slurm" / secrets.token_hex(4)
                name = f"{part[0].config.name}/{directory.name}"
            codes = submit([job.config.in_group(group) for job in part], folder=folder, name=name)
            for job, code in zip(part, codes):
                job.code = Exit.PREEMPTED if code == Exit.FAILED else code  # FAILED: its directory is in use


def _alike(jobs: list[Job]) -> Iterator[list[Job]]:
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        config = job.config
        request = JobRequest.of(config.launch, config.dataset, config.parallel, config.backend, config.device)
        asked = [config.launch.model_dump(), request.num_devices, request.num_workers]
        groups.setdefault(digest_of(asked), []).append(job)
    yield from groups.values()


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
