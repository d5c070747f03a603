"""Another package's sweeper of Hydra, by `hydra.sweeper._target_`: it draws the jobs, and gets the objective of each."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from framework.cli.run import checked_line
from framework.config.overrides import one_line
from framework.config.targets import instantiated
from framework.runs.table import TableRow
from framework.runtime.exits import Exit, RunEnded
from framework.runtime.files import write_atomically
from framework.runtime.log import LOGGER
from framework.sweep.jobs import Job, exit_code
from framework.sweep.launchers import Runner, run_task
from framework.sweep.line import Multirun


class Asked(Launcher):
    """The jobs that a sweeper launches. The same sweep again asks it anew: a finished job answers from its directory.

    So a sweeper that draws the same after the same answers continues where it was stopped.
    """

    def __init__(self, multirun: Multirun, *, place: Path) -> None:
        """`place`: the file with the lines of the jobs."""
        self._multirun, self._place = multirun, place
        self._before: list[list[str]] = []  # the lines of an earlier command's jobs
        with suppress(OSError, ValueError):  # without them, only the warning of other jobs is lost
            self._before = json.loads(place.read_text())
        self._jobs: list[Job] = []

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Part of Hydra's protocol; `run` has what this needs."""

    def run(self, runner: Runner) -> None:
        """Let the sweeper launch its jobs, until it has enough or a job is interrupted."""
        self._runner, self._jobs, config = runner, [], runner.config.copy()
        for key, value in (("sweeper", self._multirun.sweeper), ("sweep.dir", str(self._place.parent.absolute()))):
            OmegaConf.update(config, f"hydra.{key}", value, merge=False, force_add=True)
        plugins: Any = Plugins.instance()
        plugins.instantiate_launcher = lambda **_: self  # the method by which a sweeper gets its launcher
        try:
            sweeper: Sweeper = instantiated(OmegaConf.to_container(config.hydra.sweeper, resolve=True), as_configs=True)
            sweeper.setup(hydra_context=runner.context, task_function=run_task, config=config)
            sweeper.sweep(arguments=self._multirun.arguments)
        except (_Interrupted, _Failed):
            return  # the end of the sweep tells of the jobs
        except RunEnded:
            raise
        except Exception as error:  # of any sweeper
            raise RunEnded(f"hydra/sweeper: {type(error).__name__}: {one_line(error)}") from error
        finally:
            del plugins.instantiate_launcher

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run these jobs, as Hydra documents it, and return the objective of each, or for a failed job an exception."""
        jobs = [*self._checked([*line] for line in job_overrides)]
        self._jobs += jobs
        launched = [job.line for job in self._jobs]
        if any(one != other for one, other in zip(launched, self._before)):
            LOGGER.warning("hydra/sweeper draws other jobs than before: it would continue if it drew the same again, by a seed")
            self._before = launched
        self._before += launched[len(self._before) :]
        write_atomically(self._place, json.dumps(self._before))
        alike = {job.directory.path: job for job in reversed(jobs)}
        self._runner.run(reversed(alike.values()))
        for job in jobs:
            job.code = alike[job.directory.path].code
        if Exit.PREEMPTED in [job.code for job in jobs]:
            raise _Interrupted
        return [_answer(job) for job in jobs]

    def _checked(self, lines: Iterable[list[str]]) -> Iterator[Job]:
        fixed = {word.partition("=")[0] for word in self._multirun.fixed}
        for line in lines:
            checked = checked_line(line)
            if checked.config is None:
                raise RunEnded(f"hydra/sweeper draws a job with a problem: {' '.join(line)}: {checked.problems[0]}")
            values = {key: value for key, _, value in (word.partition("=") for word in line) if key not in fixed}
            yield Job(values, line=line, config=checked.config)

    def rows(self) -> list[TableRow]:
        """Return the states of the jobs that have been launched, also by an earlier command."""
        return [job.row() for job in (*self._jobs, *self._checked(self._before[len(self._jobs) :]))]

    @property
    def code(self) -> int:
        """The sweep's exit code until now."""
        return exit_code([job.code for job in self._jobs if job.code is not None])


class _Interrupted(BaseException):
    """A job was interrupted: no sweeper shall take it for a failure."""


class _Failed(Exception):
    """A job failed. Many sweepers end at it."""


def _answer(job: Job) -> JobReturn:
    answer = JobReturn(overrides=job.line, working_dir=job.config.run.dir, task_name="train")
    row = job.row()
    if job.code == Exit.FINISHED:
        answer.status, answer.return_value = JobStatus.COMPLETED, row.objective
    else:
        answer.status, answer.return_value = JobStatus.FAILED, _Failed(f"{job}: {row.error}")
    return answer
