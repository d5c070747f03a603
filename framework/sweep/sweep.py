"""A sweep: its jobs checked, run, and told of at the end. The same command again runs only what is missing."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import yaml

from framework.cli.run import check
from framework.config.frozen_file import digest_of
from framework.config.modes import MODES
from framework.launch.claim import report
from framework.runs.lock import Lock
from framework.runs.status import read_all, states_of, tell
from framework.runs.table import TableRow, best_of, listing
from framework.runtime import log
from framework.runtime.exits import Exit, RunEnded
from framework.runtime.files import make_directory, write_atomically
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem
from framework.sweep.jobs import Job, Pool, exit_code
from framework.sweep.line import Multirun, Values, read
from framework.sweep.picture import draw
from framework.sweep.settings import Launcher, SubmititSlurm
from framework.sweep.slurm import SlurmPool, problems_of, submit_all
from framework.sweep.table import write_csv


class Source(Protocol):
    """Where the jobs of a sweep come from."""

    @property
    def num_left(self) -> int:
        """How many jobs have not finished."""

    def next(self) -> Job | None:
        """Return a job to run now; None if there is none, as long as none of those that run has ended."""

    def is_hopeless(self, job: Job) -> bool:
        """Return whether a job that is running is to be stopped."""

    def note(self, job: Job) -> None:
        """Take in that a job has ended, as its `code` says."""

    def rows(self) -> list[TableRow]:
        """Return how the jobs stand."""

    @property
    def code(self) -> int:
        """The sweep's exit code, as far as it has come."""


class Grid:
    """The jobs that a command line lists."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs
        self._on_slurm = jobs[0].config["launch"]["kind"] == "slurm"
        self._waiting = list(jobs)

    @property
    def num_left(self) -> int:
        return sum(not job.is_done for job in self._jobs)

    def next(self) -> Job | None:
        return self._waiting.pop(0) if self._waiting else None

    def is_hopeless(self, job: Job) -> bool:
        return False

    def note(self, job: Job) -> None:
        pass

    def rows(self) -> list[TableRow]:
        states = states_of(job.directory for job in self._jobs) if self._on_slurm else {}
        return [
            TableRow.read(job.config, job.values, state=states.get(job.directory.path), code=job.code)
            for job in self._jobs
        ]

    @property
    def code(self) -> int:
        return exit_code([job.code for job in self._jobs if job.code is not None])


def sweep(overrides: list[str], problems: list[Problem]) -> int:
    """Run a `-m` line to its end; `problems` are those of its flags. Returns the exit code."""
    log.start_console(rank=0)
    multirun, found = read(overrides)
    jobs, problems = _checked(multirun, [*problems, *found])
    if problems:
        return report(problems)
    if jobs[0].config["mode"] in MODES:
        return report([Problem("mode", f"{jobs[0].config['mode']} is about one run", "without -m")])
    try:
        return _carry_out(overrides, multirun, jobs)
    except RunEnded as end:
        LOGGER.error("%s", end)
        return end.code


def _carry_out(overrides: list[str], multirun: Multirun, jobs: list[Job]) -> int:
    """Do with the jobs what `mode` says. Returns the exit code."""
    directory = _directory(multirun, jobs)
    if jobs[0].config["mode"] == "plan":
        return _plan(multirun, jobs, directory)
    if jobs[0].config["mode"] == "status":
        return _tell_status(multirun, jobs, directory)
    on_slurm = jobs[0].config["launch"]["kind"] == "slurm"
    if on_slurm and (problems := problems_of(jobs)):
        return report(problems)
    lock = Lock(directory)
    try:
        lock.take()
        _describe(overrides, multirun, directory)
    except OSError as error:
        LOGGER.error("the sweep's directory cannot be written: %s", error)
        return Exit.DISK
    try:
        source = _source(multirun, jobs, directory)
        if on_slurm and not isinstance(multirun.launcher, SubmititSlurm):
            submit_all(jobs, directory=directory, group=_group(directory))
            LOGGER.info("how they stand: python train.py mode=status run.root=%s", directory)
            return _end(source, jobs[0].config, directory)
        return _run(source, multirun, jobs[0].config, directory)
    finally:
        lock.release()


def _checked(multirun: Multirun, problems: list[Problem]) -> tuple[list[Job], list[Problem]]:
    """Return the jobs that are known before the first runs (all, but of a search), with every problem of the line.

    Every value is looked at first, so that one that is wrong is told once; then every combination.
    """
    jobs, found = _composed(multirun, multirun.samples())
    problems = [*problems, *(problem for problem in found if problem not in problems)]
    problems = problems or _launch_problems(multirun, jobs)
    if problems or multirun.sweeper is not None:
        return jobs, problems
    jobs, problems = _composed(multirun, multirun.combinations())
    by_place: dict[str, Job] = {}
    for job in jobs:
        other = by_place.setdefault(job.config["run"]["dir"], job)
        if other.config["run"]["id"] != job.config["run"]["id"]:
            what = f"{other.directory.path} would hold several runs ({other}; {job})"
            return [], [Problem("run.dir", what, "run.root and name can be given to a sweep")]
    if len(by_place) < len(jobs):
        LOGGER.warning("%d of these %d jobs are the same run as another", len(jobs) - len(by_place), len(jobs))
    return list(by_place.values()), problems


def _launch_problems(multirun: Multirun, jobs: list[Job]) -> list[Problem]:
    """Return why the jobs cannot be launched together."""
    kinds = {job.config["launch"]["kind"] for job in jobs}
    if len(kinds) > 1:
        return [Problem("launch", f"is {' and '.join(sorted(kinds))} in one sweep", "the same for all jobs")]
    if kinds != {"slurm"} or isinstance(multirun.launcher, SubmititSlurm):
        return []
    if multirun.sweeper is not None:
        what = "slurm, which returns at once, but a search draws from results"
        return [Problem("launch", what, "hydra/launcher=submitit_slurm, which waits for them")]
    if type(multirun.launcher) is not Launcher:
        return [Problem("hydra/launcher", "runs jobs on this machine, but launch=slurm on others", "one of the two")]
    return []


def _composed(multirun: Multirun, all_values: list[Values]) -> tuple[list[Job], list[Problem]]:
    jobs: list[Job] = []
    problems: dict[Problem, None] = {}
    for values in all_values:
        config, found = check(multirun.line(values), world_size=None)
        problems |= dict.fromkeys(found)
        if not found:
            jobs.append(Job(values, line=multirun.line(values), config=config))
    return jobs, list(problems)


def _directory(multirun: Multirun, jobs: list[Job]) -> Path:
    """Return where the sweep's record is: a hash of its runs; of a search, of where it starts, and how it draws."""
    decides: Any = sorted([job.config["name"], job.config["run"]["id"]] for job in jobs)
    if multirun.sweeper is not None:
        spaces = {key: space if isinstance(space, list) else asdict(space) for key, space in multirun.swept.items()}
        decides = [decides, spaces, multirun.sweeper.model_dump(exclude={"n_trials"})]
    return Path(jobs[0].config["run"]["root"]) / "sweeps" / digest_of(decides)[:12]


def _describe(overrides: list[str], multirun: Multirun, directory: Path) -> None:
    """Say in the sweep's directory which sweep it is."""
    write_atomically(directory / "sweep.yaml", yaml.safe_dump({"line": ["-m", *overrides]}))
    if multirun.num_at_a_time > 1:
        make_directory(directory / "logs")


def _source(multirun: Multirun, jobs: list[Job], directory: Path) -> Source:
    if multirun.sweeper is None:
        return Grid(jobs)
    from framework.sweep.search import Search  # Optuna takes a second

    return Search(multirun, jobs[0].config, directory)


def _plan(multirun: Multirun, jobs: list[Job], directory: Path) -> int:
    """List the jobs and how they stand; of a search, those that have been drawn."""
    is_new = multirun.sweeper is not None and not (directory / "search.db").exists()
    rows = [] if is_new else _source(multirun, jobs, directory).rows()
    print(listing(rows), end="")
    if multirun.sweeper is not None:
        print(
            f"{max(0, multirun.sweeper.n_trials - len(rows))} of {multirun.sweeper.n_trials} trials are still to be drawn"
        )
    return Exit.FINISHED


def _tell_status(multirun: Multirun, jobs: list[Job], directory: Path) -> int:
    """Tell how the jobs stand; of a search, those that have been drawn."""
    is_new = multirun.sweeper is not None and not (directory / "search.db").exists()
    rows = [] if is_new else _source(multirun, jobs, directory).rows()
    tell(read_all([row.directory for row in rows]), [row.assignment for row in rows])
    return Exit.FINISHED


def _run(source: Source, multirun: Multirun, config: dict[str, Any], directory: Path) -> int:
    size = max(1, min(multirun.num_at_a_time, source.num_left))
    pool: Pool | SlurmPool
    if config["launch"]["kind"] == "slurm":
        pool = SlurmPool(size=size, group=_group(directory))
    else:
        pool = Pool(size=size, logs=directory / "logs", group=_group(directory))
    PREEMPTION.watch()
    _record(source, directory)
    while not PREEMPTION.requested or pool.running:
        while pool.has_room and not PREEMPTION.requested and (job := source.next()) is not None:
            if job.is_done:
                job.code = Exit.FINISHED
                source.note(job)
                LOGGER.info("finished already: %s, in %s", job, job.directory.path)
            else:
                LOGGER.info("running %s, in %s", job, job.directory.path)
                pool.start(job)
        if not pool.running:
            break
        for job in pool.running:
            if source.is_hopeless(job):
                pool.stop(job)
        for job in pool.wait(timeout_s=0.2):
            source.note(job)
            _record(source, directory)
            if size > 1:
                LOGGER.info("%s", f"{TableRow.read(job.config, job.values, code=job.code).state}: {job}")
    return _end(source, config, directory)


def _group(directory: Path) -> str:
    return f"sweep-{directory.name}"


def _record(source: Source, directory: Path) -> None:
    try:
        write_csv(source.rows(), directory / "sweep.csv")
    except OSError as error:
        LOGGER.warning("%s could not be written: %s", directory / "sweep.csv", error.strerror)


def _end(source: Source, config: dict[str, Any], directory: Path) -> int:
    """Draw the picture, name the best and those that failed. Returns the exit code."""
    monitor, mode = config["checkpoint"]["monitor"], config["checkpoint"]["mode"]
    _record(source, directory)
    rows = source.rows()
    try:
        draw(rows, directory / "sweep.png", monitor=monitor, mode=mode)
    except OSError as error:
        LOGGER.warning("%s could not be written: %s", directory / "sweep.png", error.strerror)
    states = Counter(row.state for row in rows)
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    LOGGER.info("%s", f"{len(rows)} job{'s' * (len(rows) != 1)}: {told}; see {directory}")
    if (best := best_of(rows, mode=mode)) is not None:
        of = f": {best.assignment}" if best.assignment else ""
        LOGGER.info("%s", f"best {monitor} {best.objective:.4g}{of}, in {best.directory.path}")
    if PREEMPTION.requested and source.num_left:
        LOGGER.info("stopped; the same command continues")
        return Exit.PREEMPTED
    if states["failed"]:
        LOGGER.info("%d of %d jobs failed:", states["failed"], len(rows))
    for row in rows:
        if row.state == "failed":
            told = f"exit {row.code}: " if row.code is not None else ""
            LOGGER.info("%s", f"  {told}{row.assignment}: {row.error}")
    return source.code
