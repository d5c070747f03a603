"""A sweep as Slurm jobs."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

from framework.config.frozen_file import digest_of
from framework.launch.slurm import submit
from framework.preflight.slurm import job_options, job_problems, slurm_section
from framework.runs.status import queued_jobs
from framework.runtime import slurm
from framework.runtime.exits import Exit
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem
from framework.runtime.slurm import SlurmFailed
from framework.sweep.jobs import Job

_LARGEST_ARRAY = 500  # Slurm's own limit is 1001 unless the site has changed it; and each job's lock is a file held open


def problems_of(jobs: list[Job]) -> list[Problem]:
    """Return what would keep any of the jobs that are left from running, in torch's eyes or Slurm's."""
    left = [job for job in jobs if not job.is_done]
    from framework.preflight.dry_build import dry_build  # torch, which a sweep that is finished does without

    found = [problem for job in left for problem in dry_build(job.config)]
    for config in [alike[0].config for alike in _alike(left)] if not found else []:
        found += job_problems(config.run, config.launch, job_name=f"{config.name}/{config.run.id}")
    return list(dict.fromkeys(found))


def submit_all(jobs: list[Job], *, directory: Path, group: str) -> None:
    """Submit the jobs that have not finished, nor wait or run already. Each job's code is then that of its submission.

    Those that ask for the same are an array. `directory` is the sweep's.
    """
    for job in jobs:
        if job.is_done:
            job.code = Exit.FINISHED
            LOGGER.info("finished already: %s, in %s", job, job.directory.path)
    for alike in _alike([job for job in jobs if not job.is_done]):
        for start in range(0, len(alike), _LARGEST_ARRAY):
            part = alike[start : start + _LARGEST_ARRAY]
            folder, name = part[0].directory.path / "slurm", None
            if len(part) > 1:
                folder = next(path for n in itertools.count(1) if not (path := directory / "slurm" / str(n)).exists())
                name = f"{part[0].config.name}/{directory.name}"
            _submit(part, group=group, folder=folder, name=name)


def _submit(jobs: list[Job], *, group: str, folder: Path, name: str | None = None) -> None:
    configs = [job.config.in_group(group) for job in jobs]
    for job, code in zip(jobs, submit(configs, folder=folder, name=name)):
        job.code = Exit.PREEMPTED if code == Exit.FAILED else code  # of the submission, which says nothing of the run


def _alike(jobs: list[Job]) -> Iterator[list[Job]]:
    """Yield the jobs in groups that ask for the same."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        asked = slurm_section(job.config.launch).model_dump()
        groups.setdefault(digest_of([job_options(job.config.launch, job_name=""), asked]), []).append(job)
    yield from groups.values()


class SlurmPool:
    """What a `Pool` is to a sweep, its jobs being Slurm's. They outlive this process, which takes them up again."""

    def __init__(self, *, size: int, group: str) -> None:
        self.size = size  # jobs at a time
        self._group = group
        self._running: list[Job] = []
        self._refused: list[Job] = []
        self._looks_at = 0.0  # on time.monotonic's clock

    @property
    def has_room(self) -> bool:
        return len(self._running) < self.size and not self._refused

    @property
    def running(self) -> list[Job]:
        """Those in the queue, and those that Slurm did not take: these are tried again when another has ended."""
        return self._running + self._refused

    def start(self, job: Job) -> None:
        """Submit the job, unless it waits or runs already."""
        _submit([job], group=self._group, folder=job.directory.path / "slurm")
        (self._running if job.code == Exit.FINISHED else self._refused).append(job)

    def stop(self, job: Job) -> None:
        """Have a job save a checkpoint and end."""
        try:
            slurm.cancel(job.directory.job_id or "")
        except SlurmFailed as error:
            LOGGER.warning("%s: %s", job, error)

    def wait(self, *, timeout_s: float) -> list[Job]:
        """Wait until a job ends, or for `timeout_s`. Returns those that have ended, with their exit codes.

        When this process is asked to stop, it waits for none any more.
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
            for job in refused:
                self.start(job)
        if not self._running:  # and there is nothing to wait for
            ended, self._refused = ended + self._refused, []
        return ended


_PAUSE_S = 2.0  # between two questions to the controller, which all users share
_CODES = {"finished": Exit.FINISHED, "preempted": Exit.PREEMPTED, "queued": Exit.PREEMPTED}  # queued: cancelled before it began
