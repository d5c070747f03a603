"""The jobs of a command line with several values: one job for each combination."""

from framework.runs.status import standings
from framework.runs.table import TableRow
from framework.sweep.jobs import Job, exit_code


class Grid:
    """The jobs of a command line with several values."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs
        self._on_slurm = jobs[0].config.launch.kind == "slurm"
        self._waiting = list(jobs)

    @property
    def num_left(self) -> int:
        """The number of jobs that have not finished."""
        return sum(not job.is_done for job in self._jobs)

    def next(self) -> Job | None:
        """Return a job to run now, or None if no job can start until a running job ends."""
        return self._waiting.pop(0) if self._waiting else None

    def is_hopeless(self, job: Job) -> bool:
        """Return whether a running job should be stopped."""
        return False

    def note(self, job: Job) -> None:
        """Record that a job has ended, with its `code`."""

    def rows(self) -> list[TableRow]:
        """Return the states of the jobs."""
        found = standings(job.directory for job in self._jobs) if self._on_slurm else {}
        return [job.row(state=found[job.directory.path].state if found else None) for job in self._jobs]

    @property
    def code(self) -> int:
        """The sweep's exit code until now."""
        return exit_code([job.code for job in self._jobs if job.code is not None])
