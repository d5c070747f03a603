"""A sweep: its jobs are checked, run, and reported at the end. The same command again runs only the missing jobs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from framework.cli.callbacks import multirun_callbacks
from framework.cli.control import cancel
from framework.cli.run import checked_line
from framework.config.frozen_file import digest_of
from framework.config.modes import MODES
from framework.config.targets import locate
from framework.config.trainer import CheckpointSection
from framework.launch.claim import print_problems
from framework.runs.directory import RunDirectory
from framework.runs.status import print_table
from framework.runs.table import TableRow, best_of, listing, write_csv
from framework.runtime import log
from framework.runtime.exits import Exit, RunEnded
from framework.runtime.files import make_directory, write_atomically
from framework.runtime.lock import Lock
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem
from framework.runtime.program import program, typed_override
from framework.runtime.secrets import redact
from framework.sweep.jobs import Grid, Job, problems_of
from framework.sweep.line import Multirun, read
from framework.sweep.pools import Pool, SlurmPool, submit_all
from framework.sweep.settings import Launcher, OtherLauncher, SubmititSlurm
from framework.sweep.space import Values

if TYPE_CHECKING:
    from framework.sweep.hydra_pool import HydraPool
    from framework.sweep.search import Search

JobSource: TypeAlias = "Grid | Search"  # the source of a sweep's jobs
JobPool: TypeAlias = "Pool | SlurmPool | HydraPool"


def sweep(overrides: list[str], problems: list[Problem]) -> int:
    """Run a `-m` line to its end. `problems` are the problems of its flags. Return the exit code."""
    log.start_console(rank=0)
    multirun, found = read(overrides)
    try:
        jobs, problems = _checked(multirun, [*problems, *found])
        if problems:
            return print_problems(problems)
        mode = MODES[jobs[0].config.mode]
        if not mode.sweep:
            return print_problems([Problem("mode", f"{mode.name} does nothing with a sweep", "without -m")])
        return locate(mode.sweep)(Sweep(overrides, multirun, jobs))
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
        if self.multirun.sweeper is not None:
            spaces = {one.name: one.values if isinstance(one.values, list) else asdict(one.values)
                      for one in self.multirun.space.dimensions}  # fmt: skip
            decides = [decides, spaces, self.multirun.sweeper.decisive()]
        return Path(self.jobs[0].config.run.root) / "sweeps" / digest_of(decides)[:12]

    def source(self) -> JobSource:
        """Return the source of the jobs."""
        if self.multirun.sweeper is None:
            return Grid(self.jobs)
        from framework.sweep.search import Search  # the import of Optuna takes a second

        saving = self.jobs[0].config.checkpoint
        return Search(self.multirun, monitor=saving.monitor, mode=saving.direction, directory=self.directory)

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
    if sweeper is not None:
        num_trials = sweep.multirun.num_trials
        print(f"{max(0, num_trials - len(rows))} of {num_trials} trials are still to be drawn")
    return Exit.FINISHED


def cancel_jobs(sweep: Sweep) -> int:
    """Stop the command that runs the sweep, so that it starts no more jobs, and then the jobs."""
    return cancel([RunDirectory(sweep.directory), *(row.directory for row in sweep.rows())])


def run_jobs(sweep: Sweep) -> int:
    """Run the jobs, on this machine or on a cluster."""
    multirun, jobs, directory, config = sweep.multirun, sweep.jobs, sweep.directory, sweep.jobs[0].config
    on_slurm, group = config.launch.kind == "slurm", f"sweep-{directory.name}"
    rehearsed: set[str] = set()
    if problems := problems_of(jobs, rehearsed=rehearsed):
        return print_problems(problems)
    lock = Lock(directory)
    try:
        lock.take()
        line = [redact(text) for text in sweep.overrides]
        write_atomically(directory / "sweep.yaml", yaml.safe_dump({"line": ["-m", *line]}))
        if multirun.num_at_a_time > 1 and not isinstance(multirun.launcher, OtherLauncher):
            make_directory(directory / "logs")
    except OSError as error:
        LOGGER.error("the sweep's directory cannot be written: %s", error)
        return Exit.DISK
    try:
        source = sweep.source()
        if on_slurm and not isinstance(multirun.launcher, SubmititSlurm):
            for job in [job for job in jobs if job.is_done]:
                job.skip()
            submit_all([job for job in jobs if not job.is_done], directory=directory, group=group)
            LOGGER.info("their states: %s mode=status %s", program(), typed_override("run.root", str(directory)))
            return _end(source, config.checkpoint, directory)
        size = max(1, min(multirun.num_at_a_time, source.num_left))
        pool: JobPool = Pool(size=size, group=group, logs=directory / "logs", rehearsed=rehearsed)
        if on_slurm:
            pool = SlurmPool(size=size, group=group, directory=directory)
        elif isinstance(multirun.launcher, OtherLauncher):
            from framework.sweep.hydra_pool import HydraPool

            pool = HydraPool(multirun.launcher.node, size=size, group=group, directory=directory)
        with multirun_callbacks(jobs[0].line):
            return _run(source, pool, config.checkpoint, directory)
    finally:
        lock.release()


def _checked(multirun: Multirun, problems: list[Problem]) -> tuple[list[Job], list[Problem]]:
    """Return the jobs that are known before the first job runs (all jobs, unless it is a search), and all problems.

    Check each value first, so that a wrong value is reported once. Then check each combination.
    """
    jobs, found = _composed(multirun, multirun.space.samples())
    problems = [*problems, *(multirun.space.explained(problem) for problem in found if problem not in problems)]
    problems = problems or [*_launch_problems(multirun, jobs), *_objective_problems(multirun, jobs[0])]
    if problems or multirun.sweeper is not None:
        return jobs, problems
    jobs, problems = _composed(multirun, multirun.space.combinations())
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
    if kinds != {"slurm"} or isinstance(multirun.launcher, SubmititSlurm):
        return []
    if multirun.sweeper is not None:
        what = "slurm, which returns at once, but a search needs results"
        return [Problem("launch", what, "hydra/launcher=submitit_slurm, which waits for them")]
    if type(multirun.launcher) is not Launcher:
        return [Problem("hydra/launcher", "runs the jobs itself, but launch=slurm runs them on a cluster", "one of the two")]
    return []


def _objective_problems(multirun: Multirun, job: Job) -> list[Problem]:
    """Return the problems of objectives that are not metrics of a run, with the check of checkpoint.monitor."""
    if multirun.sweeper is None:
        return []
    found = list(multirun.sweeper.direction_problems(job.config.checkpoint.direction))
    for name in multirun.sweeper.metrics:
        problems = checked_line([*job.line, f"checkpoint.monitor={name}", "checkpoint.mode=min"]).problems
        found += [
            replace(problem, key="hydra.sweeper.objectives") for problem in problems if problem.key == "checkpoint.monitor"
        ]
    return found


def _composed(multirun: Multirun, all_values: list[Values]) -> tuple[list[Job], list[Problem]]:
    jobs: list[Job] = []
    problems: dict[Problem, None] = {}
    for values in all_values:
        checked = checked_line(multirun.line(values))
        problems |= dict.fromkeys(checked.problems)
        if checked.config is not None:
            jobs.append(Job(values, line=multirun.line(values), config=checked.config))
    return jobs, list(problems)


def _run(source: JobSource, pool: JobPool, saving: CheckpointSection, directory: Path) -> int:
    PREEMPTION.watch()
    _write(source.rows(), directory / "sweep.csv", write_csv)
    while not PREEMPTION.requested or pool.running:
        if due := _due(source, pool.room):
            pool.start(due)
        if not pool.running:
            break
        for job in pool.running:
            if source.is_hopeless(job):
                pool.stop(job)
        for job in pool.wait(timeout_s=0.2):
            source.note(job)
            _write(source.rows(), directory / "sweep.csv", write_csv)
            if pool.size > 1:
                LOGGER.info("%s", f"{job.row().state}: {job}")
    return _end(source, saving, directory)


def _due(source: JobSource, room: int) -> list[Job]:
    """Return the jobs to start now, and record the jobs that have finished before."""
    due: list[Job] = []
    while len(due) < room and not PREEMPTION.requested and (job := source.next()) is not None:
        if job.is_done:
            job.skip()
            source.note(job)
        else:
            LOGGER.info("running %s, in %s", job, job.directory.path)
            due.append(job)
    return due


def _write(rows: list[TableRow], target: Path, write: Callable[[list[TableRow], Path], None]) -> None:
    try:
        write(rows, target)
    except OSError as error:
        LOGGER.warning("%s could not be written: %s", target, error.strerror)


def _end(source: JobSource, saving: CheckpointSection, directory: Path) -> int:
    """Log the best job and the failed jobs. Return the exit code."""
    rows = source.rows()
    _write(rows, directory / "sweep.csv", write_csv)
    states = Counter(row.state for row in rows)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    LOGGER.info("%s", f"{len(rows)} job{'s' * (len(rows) != 1)}: {counts}; see {directory}")
    for row in (pareto := [row for row in rows if row.is_pareto]):
        values = ", ".join(f"{name} {value:.4g}" for name, value in row.objectives.items())
        LOGGER.info("%s", f"Pareto: {values}: {row.assignment}, in {row.directory.path}")
    if not pareto and (best := best_of(rows, mode=saving.direction)) is not None:
        of = f": {best.assignment}" if best.assignment else ""
        LOGGER.info("%s", f"best {saving.monitor} {best.objective:.4g}{of}, in {best.directory.path}")
    if PREEMPTION.requested and source.num_left:
        LOGGER.info("stopped; the same command continues")
        return Exit.PREEMPTED
    if states["failed"]:
        LOGGER.info("%d of %d jobs failed:", states["failed"], len(rows))
    for row in (row for row in rows if row.state == "failed"):
        code = f"exit {row.code}: " if row.code is not None else ""
        LOGGER.info("%s", f"  {code}{row.assignment}: {row.error}")
    return source.code
