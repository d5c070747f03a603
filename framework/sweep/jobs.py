"""The jobs of a sweep, the problems that are found before the first job runs, and the exit code of a sweep."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from framework.cli.run import builder_of, rehearsal_problems, start
from framework.config.draft import Draft
from framework.config.frozen_file import digest_of
from framework.config.schema import RunConfig
from framework.launch.claim import accept_code, is_over
from framework.launch.mirrored import put_missing
from framework.preflight.check import changed_code
from framework.preflight.slurm import JobRequest, job_problems
from framework.runs.directory import RunDirectory
from framework.runs.provenance import WAYS
from framework.runs.table import TableRow
from framework.runtime.exits import Exit
from framework.runtime.log import LOGGER
from framework.runtime.problem import Problem
from framework.sweep.space import Values

if TYPE_CHECKING:
    from framework.build.training import Builder


@dataclass(eq=False)
class Job:
    """One run of a sweep: its command line, its configuration, and its exit code."""

    values: Values
    line: list[str]
    config: RunConfig
    code: int | None = None  # None: it has not been launched, or not ended
    is_rehearsed: bool = False  # a job that is alike has passed

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(Path(self.config.run.dir))

    @property
    def build(self) -> "Builder":
        return builder_of(self.draft)

    @property
    def draft(self) -> Draft:
        """The configuration as a draft without problems."""
        return Draft(dict(self.config), [])

    @property
    def is_done(self) -> bool:
        return is_over(self.config.run)

    @property
    def stale_code(self) -> str:
        """The unaccepted changes of the code since the job's last start. Empty if there are none."""
        return "; ".join(changed_code(self.config.run, self.config.targets()))

    def run(self) -> int:
        """Run the job to its end, in this process. Return its exit code."""
        return start(self.line, checked=self.draft, is_rehearsed=self.is_rehearsed)

    def skip(self) -> None:
        """Treat a finished job as a job that has run, after its mirror got what was missing."""
        accept_code(self.config.run, targets=self.config.targets())
        self.code = put_missing(self.config.run, name=self.config.name)
        LOGGER.info("finished already: %s, in %s", self, self.directory.path)

    def row(self, *, state: str | None = None) -> TableRow:
        """Return the job's state. It is `stale` if the job started with other code."""
        state = "stale" if self.code is None and self.stale_code else state
        return TableRow.read(self.config.run, self.values, state=state, code=self.code)

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items()) or " ".join(self.line)


def exit_code(codes: list[int]) -> int:
    """Return a sweep's exit code: 75 if a job was preempted, else the common code of all failed jobs, else 1."""
    failed = set(codes) - {Exit.FINISHED, Exit.PREEMPTED}
    if Exit.PREEMPTED in codes:
        return Exit.PREEMPTED
    return Exit.FINISHED if not failed else failed.pop() if len(failed) == 1 else Exit.FAILED


def problems_of(jobs: list[Job], *, rehearsed: set[str]) -> list[Problem]:
    """Return the problems of any unfinished job, or a problem if jobs are stale. Rehearse jobs that are alike once.

    Add to `rehearsed` what has been rehearsed (see `subject`).
    """
    if stale := [job for job in jobs if job.stale_code]:
        what = f"{len(stale)} of {len(jobs)} runs of this sweep started with other code: {stale[0].stale_code}"
        return [Problem("run.code", what, WAYS)]
    left = [job for job in jobs if not job.is_done]
    if not left:
        return []
    from framework.preflight.dry_build import build_problems  # imports torch, which a finished sweep does not need
    from framework.preflight.rehearsal import subject

    by_seed = {digest_of(job.config.with_run(id="", dir="").plain() | {"seed": 0}): (job, job.build) for job in left}
    if found := _of_jobs(by_seed.values(), build_problems):
        return found
    subjects = {subject(build): (job, build) for job, build in by_seed.values()}
    found = _of_jobs(subjects.values(), rehearsal_problems)
    rehearsed.update(subjects)
    is_submitted = not found and left[0].config.launch.kind == "slurm"
    for alike in alike_jobs(left) if is_submitted else []:
        draft = alike[0].draft
        draft.check(job_problems)
        found += draft.problems
    return list(dict.fromkeys(found))


def _of_jobs(jobs: Collection[tuple[Job, "Builder"]], find: Callable[["Builder"], list[Problem]]) -> list[Problem]:
    """Return the problems that `find` finds. A problem that not all jobs have names the first job that has it."""
    found: dict[Problem, list[Job]] = {}
    for job, build in jobs:
        for problem in find(build):
            found.setdefault(problem, []).append(job)
    return [problem if len(of) == len(jobs) else replace(problem, what=f"{problem.what} (in the job {of[0]})")
            for problem, of in found.items()]  # fmt: skip


def alike_jobs(jobs: list[Job]) -> Iterator[list[Job]]:
    """Yield the jobs with equal requests to Slurm."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        config = job.config
        request = JobRequest.of(config.launch, config.dataset, config.parallel, config.backend, config.device)
        asked = [config.launch.model_dump(), request.num_devices, request.num_workers]
        groups.setdefault(digest_of(asked), []).append(job)
    yield from groups.values()
