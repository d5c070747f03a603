"""The launchers of a sweep. Each is a launcher of Hydra: it gets the overrides of jobs, and returns when they have ended."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from framework.cli.run import checked_line, start
from framework.config.compose import with_hydra
from framework.config.folders import ROOT
from framework.config.overrides import one_line
from framework.config.schema import Node
from framework.config.targets import instantiated
from framework.launch.decision import print_problems
from framework.runtime.environment import variables
from framework.runtime.exits import Exit, Unfit
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem
from framework.sweep.jobs import Job

PREPARED: dict[tuple[str, ...], Job] = {}  # by their lines: the jobs that this process, or the one that forked it, has checked


class OwnLauncher(Launcher):
    """A launcher of this framework. It knows its jobs, sets the code of each when it ends, and can stop a job."""

    n_jobs = 1  # the number of jobs at a time
    should_stop: Callable[[Job], bool]
    ended: Callable[[], None]  # called after each end

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self.directory = Path(config.hydra.sweep.dir).parent  # of the sweep

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        jobs = [PREPARED[tuple(line)] for line in job_overrides]
        self.run(jobs)
        return [JobReturn(status=JobStatus.COMPLETED, _return_value=job.code) for job in jobs]

    @abstractmethod
    def run(self, jobs: list[Job]) -> None:
        """Run the jobs. Each then has its code, which is 75 if it has not run to its end."""


def run_task(config: DictConfig) -> int:
    """Run a job, which the sweep has rehearsed, where another package's launcher has put it. Return its exit code."""
    line = [str(text) for text in HydraConfig.get().overrides.task]
    if PREEMPTION.requested:
        return Exit.PREEMPTED
    if (job := PREPARED.get(tuple(line))) is not None:
        return job.run()
    checked = checked_line([f"run.group={config.run.group}", *line])
    return print_problems(checked.problems) if checked.problems else start(line, checked=checked, is_rehearsed=True)


class _Loader:
    """What a launcher needs of Hydra's config loader: the configuration of a job. It travels to the job's process."""

    def __init__(self, directory: Path, group: str) -> None:
        self._directory, self._group = str(directory.absolute()), group

    def load_sweep_config(self, master_config: DictConfig | None, sweep_overrides: list[str]) -> DictConfig:
        config = with_hydra([f"run.group={self._group}", *sweep_overrides])
        OmegaConf.set_readonly(config.hydra, False)
        quiet = {"version": 1, "root": None}  # a run has its own log
        settings = {
            "overrides.task": sweep_overrides,
            "sweep.dir": f"{self._directory}/launcher",
            "job_logging": quiet,
            "hydra_logging": quiet,
        }
        for key, value in settings.items():
            OmegaConf.update(config, f"hydra.{key}", value, merge=False, force_add=True)
        return config


class Runner:
    """The jobs of a sweep and their launcher."""

    def __init__(self, node: Node, *, first: Job, directory: Path, rehearsed: set[str]) -> None:
        """Build the launcher from its node, whose interpolations may refer to the configuration of the `first` job."""
        self._group, self._rehearsed = f"sweep-{directory.name}", rehearsed
        self.record: Callable[[], None] = lambda: None  # called when the states of jobs have changed
        self._num_started = 0
        loader = _Loader(directory, self._group)
        self.config = config = loader.load_sweep_config(None, first.line)
        OmegaConf.update(config, "hydra.launcher", node, merge=False, force_add=True)
        try:
            self.launcher: Launcher = instantiated(OmegaConf.to_container(config.hydra.launcher, resolve=True))
        except Exception as error:  # of any launcher
            raise Unfit(str(Problem.of_error("hydra.launcher", error))) from error
        # the job calls callbacks
        self.context = HydraContext(config_loader=loader, callbacks=Callbacks())  # type: ignore[arg-type]
        if not isinstance(self.launcher, OwnLauncher):  # its jobs import this framework, perhaps in another Python
            variables()["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [variables().get("PYTHONPATH")])])
        self.launcher.setup(hydra_context=self.context, task_function=run_task, config=config)

    def run(self, jobs: Iterable[Job], *, should_stop: Callable[[Job], bool] = lambda job: False) -> None:
        """Run the jobs that have not finished; no two of them are the same run. Each job then has its exit code."""
        self.record()
        due: list[Job] = []
        for job in jobs:
            if job.is_done:
                job.skip()
            else:
                due.append(job)
        if due:
            self._launch(due, should_stop)

    def _launch(self, jobs: list[Job], should_stop: Callable[[Job], bool]) -> None:
        from framework.preflight.rehearsal import subject

        launcher = self.launcher
        for job in jobs:
            job.is_rehearsed = subject(job.build) in self._rehearsed
            if job.config.run.group is None:
                job.config = job.config.with_run(group=self._group)
            PREPARED[tuple(job.line)] = job
        if isinstance(launcher, OwnLauncher):
            launcher.should_stop, launcher.ended = should_stop, self.record
        else:
            LOGGER.info("running %s", "; ".join(map(str, jobs)))
        try:
            returns: Sequence[JobReturn] = launcher.launch([job.line for job in jobs], initial_job_idx=self._num_started)
        except Exception as error:  # of any launcher
            if isinstance(launcher, OwnLauncher):
                raise
            LOGGER.error("hydra/launcher: %s: %s", type(error).__name__, one_line(error))
            returns = [JobReturn() for _ in jobs]
        self._num_started += len(jobs)
        for job, result in zip(jobs, returns):
            job.code = _code(job, result)
            self._rehearsed |= {subject(job.build)} if job.code == Exit.FINISHED else set()


def _code(job: Job, result: JobReturn) -> int:
    """Return the exit code of a job. If its launcher has none, the job failed, unless its directory has its result."""
    value = result._return_value
    if result.status == JobStatus.COMPLETED and isinstance(value, int):
        return value
    if job.is_done:
        return Exit.FINISHED
    LOGGER.error("hydra/launcher: a job has no exit code%s", f": {type(value).__name__}: {value}" if value is not None else "")
    return Exit.FAILED
