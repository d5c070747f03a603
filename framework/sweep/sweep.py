"""A sweep: its jobs are checked, run, and reported at the end. The same command again runs only the missing jobs."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from framework.cli.callbacks import callbacks
from framework.cli.control import cancel
from framework.cli.run import checked_line
from framework.config.frozen_file import digest_of
from framework.config.hydra_compose import LAUNCHER
from framework.config.modes import MODES
from framework.config.targets import locate
from framework.config.trainer import CheckpointSection
from framework.launch.decision import print_problems
from framework.runs.directory import RunDirectory
from framework.runs.status import print_table, standings
from framework.runs.table import TableRow, best_of, listing, write_csv
from framework.runtime import log
from framework.runtime.exits import Exit, RunEnded
from framework.runtime.files import write_atomically
from framework.runtime.lock import Lock
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem
from framework.runtime.program import program, typed_override
from framework.runtime.secrets import redact
from framework.sweep.jobs import Job, exit_code, problems_of
from framework.sweep.line import Multirun, read
from framework.sweep.space import Values, combinations, samples
from framework.sweep.sweeper import Sweeper

if TYPE_CHECKING:
    from framework.sweep.launchers import Runner
    from framework.sweep.other_sweeper import Asked
    from framework.sweep.search import Search

JobSource: TypeAlias = "Grid | Search | Asked"  # the source of a sweep's jobs


def sweep(overrides: list[str], problems: list[Problem]) -> int:
    """Run a `-m` line to its end. `problems` are the problems of its flags. Return the exit code."""
    log.start_console(rank=0)
    multirun, found = read(overrides)
    try:
        jobs, problems = _checked(multirun, [*problems, *found])
        if problems:
            return print_problems(problems)
        mode, line = MODES[jobs[0].config.mode], Sweep(overrides, multirun, jobs)
        if not mode.sweep:
            return print_problems([Problem("mode", f"{mode.name} does nothing with a sweep", "without -m")])
        with line.on_disk():
            return locate(mode.sweep)(line)  # type: ignore[no-any-return]
    except RunEnded as end:
        LOGGER.error("%s", end)
        return end.code


@dataclass(frozen=True)
class Sweep:
    """The command line of a sweep, and the jobs that are known before the first job runs (for a search: samples)."""

    overrides: list[str]
    multirun: Multirun
    jobs: list[Job]

    @property
    def directory(self) -> Path:
        """The sweep's directory. Its name is a hash of the sweep's runs; for a search, of its start and its way of drawing."""
        decides: Any = sorted([job.config.name, job.config.run.id] for job in self.jobs)
        if (sweeper := self.multirun.sweeper) is not None:
            own = [sweeper.sampler, sweeper.pruner, sweeper.study_name] if isinstance(sweeper, Sweeper) else sweeper
            decides = [decides, str(self.multirun.space), own]
        return Path(self.jobs[0].config.run.root) / "sweeps" / digest_of(decides)[:12]

    def source(self) -> JobSource:
        """Return the source of the jobs."""
        if self.multirun.sweeper is None:
            return Grid(self.jobs)
        if not isinstance(self.multirun.sweeper, Sweeper):
            from framework.sweep.other_sweeper import Asked

            return Asked(self.multirun, place=self.directory / "jobs.json")
        from framework.sweep.search import Search  # the import of Optuna takes a second

        return Search(self.multirun, saving=self.jobs[0].config.checkpoint, place=self.directory / "search.db")

    def on_disk(self) -> AbstractContextManager[None]:
        """Return a context that raises DiskFailed for errors of a search's storage."""
        if not isinstance(self.multirun.sweeper, Sweeper):
            return nullcontext()
        from framework.sweep.search import disk_errors

        return disk_errors(self.directory / "search.db")

    def rows(self) -> list[TableRow]:
        """Return the states of the jobs. For a search, return the states of the trials that have been drawn."""
        is_new = self.multirun.sweeper is not None and not self.directory.exists()
        return [] if is_new else self.source().rows()


def print_sweep_status(sweep: Sweep) -> int:
    rows = sweep.rows()
    pruned = {row.directory.path for row in rows if row.state == "pruned"}
    root, values = Path(sweep.jobs[0].config.run.root), [row.assignment for row in rows]
    print_table([row.directory for row in rows], root=root, values=values, pruned=pruned)
    return Exit.FINISHED


def print_sweep_plan(sweep: Sweep) -> int:
    rows, sweeper = sweep.rows(), sweep.multirun.sweeper
    print(listing(rows), end="")
    if isinstance(sweeper, Sweeper):
        print(f"{max(0, sweeper.n_trials - len(rows))} of {sweeper.n_trials} trials are still to be drawn")
    return Exit.FINISHED


def cancel_jobs(sweep: Sweep) -> int:
    """Stop the command that runs the sweep, so that it starts no more jobs, and then the jobs."""
    return cancel([RunDirectory(sweep.directory), *(row.directory for row in sweep.rows())])


class Grid:
    """The jobs of a command line with several values."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs

    def run(self, runner: "Runner") -> None:
        """Run the jobs."""
        runner.run(self._jobs)

    def rows(self) -> list[TableRow]:
        """Return the states of the jobs."""
        on_slurm = self._jobs[0].config.launch.kind == "slurm"
        found = standings(job.directory for job in self._jobs) if on_slurm else {}
        return [job.row(state=found[job.directory.path].state if found else None) for job in self._jobs]

    @property
    def code(self) -> int:
        """The sweep's exit code until now."""
        return exit_code([job.code for job in self._jobs if job.code is not None])


def run_jobs(sweep: Sweep) -> int:
    """Run the jobs, on this machine or on a cluster."""
    from framework.sweep.launchers import Runner  # it imports all that runs a job

    multirun, jobs, directory, config = sweep.multirun, sweep.jobs, sweep.directory, sweep.jobs[0].config
    on_slurm, rehearsed = config.launch.kind == "slurm", set[str]()
    node = _SLURM | {"waits": multirun.sweeper is not None} if on_slurm else multirun.launcher
    runner = Runner(node, first=jobs[0], directory=directory, rehearsed=rehearsed)
    if problems := problems_of(jobs, rehearsed=rehearsed):
        return print_problems(problems)
    lock = Lock(directory)
    try:
        lock.take()
        line = [redact(text) for text in sweep.overrides]
        write_atomically(directory / "sweep.yaml", yaml.safe_dump({"line": ["-m", *line]}))
    except OSError as error:
        LOGGER.error("the sweep's directory cannot be written: %s", error)
        return Exit.DISK
    try:
        source = sweep.source()
        runner.record = partial(_record, source, directory)
        PREEMPTION.watch()
        with callbacks(jobs[0].line, around="multirun"):
            source.run(runner)
        if on_slurm:
            LOGGER.info("their states: %s mode=status %s", program(), typed_override("run.root", str(directory)))
        return _end(source, config.checkpoint, directory)
    finally:
        lock.release()


_SLURM = {"_target_": "framework.sweep.pools.SlurmJobs"}


def _checked(multirun: Multirun, problems: list[Problem]) -> tuple[list[Job], list[Problem]]:
    """Return the jobs that are known before the first job runs (for a search: samples), and all problems."""
    is_search = multirun.sweeper is not None
    jobs, found = _composed(multirun, samples(multirun.space) if is_search else combinations(multirun.space))
    problems = [*problems, *(problem for problem in found if problem not in problems)]
    problems = problems or _launch_problems(multirun, jobs)
    if problems or is_search:
        return jobs, problems
    by_place: dict[str, Job] = {}
    for job in jobs:
        other = by_place.setdefault(job.config.run.dir, job)
        if other.config.run.id != job.config.run.id:
            what = f"{other.directory.path} would hold several runs ({other}; {job})"
            return [], [Problem("run.dir", what, "a sweep can have run.root and name")]
    if len(by_place) < len(jobs):
        LOGGER.warning("%d of these %d jobs are the same run as another job: they differ only in how they are executed (with "
                       "another name= each would be a run)", len(jobs) - len(by_place), len(jobs))  # fmt: skip
    return list(by_place.values()), problems


def _launch_problems(multirun: Multirun, jobs: list[Job]) -> list[Problem]:
    kinds = {job.config.launch.kind for job in jobs}
    if len(kinds) > 1:
        return [Problem("launch", f"is {' and '.join(sorted(kinds))} in one sweep", "the same for all jobs")]
    if kinds == {"slurm"} and multirun.launcher != LAUNCHER:
        what = "runs the jobs itself, but launch=slurm runs them on a cluster"
        return [Problem("hydra/launcher", what, "one of the two; launch.slurm.array_parallelism jobs run at a time")]
    return []


def _composed(multirun: Multirun, all_values: list[Values]) -> tuple[list[Job], list[Problem]]:
    jobs: list[Job] = []
    problems: dict[Problem, None] = {}
    for values in all_values:
        checked = checked_line(multirun.line(values))
        problems |= dict.fromkeys(checked.problems)
        if checked.config is not None:
            jobs.append(Job(values, line=multirun.line(values), config=checked.config))
    return jobs, list(problems)


def _record(source: JobSource, directory: Path) -> None:
    try:
        write_csv(source.rows(), directory / "sweep.csv")
    except OSError as error:
        LOGGER.warning("%s could not be written: %s", directory / "sweep.csv", error.strerror)


def _end(source: JobSource, saving: CheckpointSection, directory: Path) -> int:
    """Log the best job and the failed jobs. Return the exit code."""
    _record(source, directory)
    rows = source.rows()
    states = Counter(row.state for row in rows)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    LOGGER.info("%s", f"{len(rows)} job{'s' * (len(rows) != 1)}: {counts}; see {directory}")
    if (best := best_of(rows, mode=saving.direction)) is not None:
        of = f": {best.assignment}" if best.assignment else ""
        LOGGER.info("%s", f"best {saving.monitor} {best.objective:.4g}{of}, in {best.directory.path}")
    if states["failed"]:
        LOGGER.info("%d of %d jobs failed:", states["failed"], len(rows))
    for row in (row for row in rows if row.state == "failed"):
        code = f"exit {row.code}: " if row.code is not None else ""
        LOGGER.info("%s", f"  {code}{row.assignment}: {row.error}")
    if source.code == Exit.PREEMPTED:
        LOGGER.info("stopped; the same command continues")
    return source.code
