"""Our own launchers: jobs in processes that are forked from this process, several at a time, or as Slurm jobs."""

import multiprocessing
import os
import secrets
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from framework.config.schema import Positive
from framework.launch.slurm import submit
from framework.runs.facts import be_brief
from framework.runs.status import queued_jobs
from framework.runtime import slurm
from framework.runtime.environment import variables
from framework.runtime.exits import Exit
from framework.runtime.files import make_directory
from framework.runtime.forks import begin_child
from framework.runtime.log import LOGGER
from framework.runtime.memory import cpus
from framework.runtime.preemption import PREEMPTION, held_back
from framework.runtime.slurm import SlurmFailed
from framework.sweep.jobs import Job, alike_jobs
from framework.sweep.launchers import OwnLauncher

JobShare = tuple[list[int], list[str]]  # CPUs, and CUDA devices as in CUDA_VISIBLE_DEVICES


class Pool(OwnLauncher):
    """Runs at most `n_jobs` jobs at a time (-1: one for each CUDA device, or CPU). PREEMPTION of this process stops all jobs.

    A job's memory, CUDA context and OpenMP threads end with its process. A killed job ends no other job, and no job lives
    longer than this process. With more than one job at a time, each job has its share of the CPUs and of the CUDA devices, and
    writes its console output into the sweep's `logs`.
    """

    def __init__(self, n_jobs: Positive | Literal[-1] = 1) -> None:
        self._cpus = cpus()
        self.n_jobs = n_jobs if n_jobs > 0 else len(_devices() or self._cpus)
        # a thread that never computes (framework.runtime.forks.in_new_thread) and lives as long as the jobs, which die with it
        self._forks = ThreadPoolExecutor(1)

    def run(self, jobs: list[Job]) -> None:
        """Run the jobs to their end. After a signal to stop, start no more."""
        waiting, running = deque(jobs), dict[BaseProcess, tuple[Job, JobShare]]()
        size = min(self.n_jobs, len(jobs))
        devices = _devices() if size > 1 else []
        shares = [*zip(_shares(self._cpus, size), _shares(devices, size))]  # for the jobs that can start
        logs = self.directory / "logs" if size > 1 else None
        while running or (waiting and not PREEMPTION.requested):
            while waiting and shares and not PREEMPTION.requested:
                job, share = waiting.popleft(), shares.pop(0)
                running[self._started(job, share, logs=logs)] = job, share
            for process in [process for process, (job, _) in running.items() if self.should_stop(job)]:
                process.terminate()
            wait([process.sentinel for process in running], 0.2)
            for process in [process for process in running if process.exitcode is not None]:
                job, share = running.pop(process)
                code = process.exitcode or 0
                job.code = code if code >= 0 else 128 - code
                shares.append(share)
                self.ended()
                if logs is not None:
                    LOGGER.info("%s: %s", job.row().state, job)
        for job in waiting:
            job.code = Exit.PREEMPTED

    def _started(self, job: Job, share: JobShare, *, logs: Path | None) -> BaseProcess:
        """Fork the process of a job."""
        import matplotlib.figure  # noqa: F401  # once, for all jobs

        import framework.launch.worker  # noqa: F401

        LOGGER.info("running %s, in %s", job, job.directory.path)
        log = None
        if logs is not None:
            make_directory(logs)
            log = logs / f"{job.config.run.id}.log"
        process = multiprocessing.get_context("fork").Process(target=_run, args=(job, share, log))
        sys.stdout.flush()
        with held_back():  # until the child can record a signal, and this process can send it on
            self._forks.submit(process.start).result()
        return process


def _devices() -> list[str]:
    from framework.distributed.devices import cuda_devices  # it imports torch: a sweep whose jobs have finished needs none

    return cuda_devices()


def _shares(those: list[Any], size: int) -> list[list[Any]]:
    """Return so many shares of CPUs or devices. If there are fewer, several shares have the same one."""
    return [those[n::size] or [those[n % len(those)]] if those else [] for n in range(size)]


def _run(job: Job, share: JobShare, log: Path | None) -> None:
    begin_child()
    be_brief()
    if log is not None:
        import torch

        own, devices = share
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, own)
        torch.set_num_threads(min(torch.get_num_threads(), len(own)))
        if devices:
            variables()["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    code = job.run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# --- as Slurm jobs

_LARGEST_ARRAY = 500  # each job's lock is an open file
_PAUSE_S = 2.0  # between two requests to the controller, which all users share
_CODES = {"finished": Exit.FINISHED, "preempted": Exit.PREEMPTED,
          "cancelled": Exit.PREEMPTED, "queued": Exit.PREEMPTED}  # queued: it left the queue before it began  # fmt: skip


class SlurmJobs(OwnLauncher):
    """Submits jobs, unless they wait or run already. They live longer than this process; the same command finds them again.

    With `waits`, it waits until they have left the queue, or until a signal to stop. Without, a job's code is the code of its
    submission.
    """

    n_jobs = 4  # trials of a search at a time

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits

    def run(self, jobs: list[Job]) -> None:
        """Submit the jobs, and perhaps wait for them."""
        for job in jobs:
            job.code = Exit.PREEMPTED
        for alike in alike_jobs(jobs):
            for first in range(0, 0 if PREEMPTION.requested else len(alike), _LARGEST_ARRAY):
                self._submit(alike[first : first + _LARGEST_ARRAY])
        if self._waits:
            self._wait([job for job in jobs if job.code == Exit.FINISHED])

    def _submit(self, jobs: list[Job]) -> None:
        folder, name = jobs[0].directory.path / "slurm", None
        if len(jobs) > 1:
            folder = self.directory / "slurm" / secrets.token_hex(4)
            name = f"{jobs[0].config.name}/{self.directory.name}"
        for job, code in zip(jobs, submit([job.config for job in jobs], folder=folder, name=name)):
            job.code = Exit.PREEMPTED if code == Exit.FAILED else code  # FAILED: its directory is in use

    def _wait(self, left: list[Job]) -> None:
        for job in left:
            job.code = Exit.PREEMPTED
        stopped = set[Job]()
        while left and not PREEMPTION.requested:
            time.sleep(_PAUSE_S)
            try:
                for job in [job for job in left if job not in stopped and self.should_stop(job)]:
                    stopped.add(job)
                    slurm.ask("scancel", job.directory.job_id or "")
                in_queue = queued_jobs(job.directory for job in left)
            except SlurmFailed as error:
                LOGGER.warning("Slurm does not answer: %s", error)
                continue
            for job in [job for job in left if job.directory.path not in in_queue]:
                left.remove(job)
                job.code = _CODES.get(job.directory.state, Exit.FAILED)
                self.ended()
                LOGGER.info("%s: %s", job.row().state, job)
