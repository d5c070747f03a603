"""Any other launcher of Hydra: it gets the overrides of the jobs, and calls a function for each job, as Hydra documents it."""

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
from framework.config.overrides import one_line
from framework.config.targets import instantiated, locate
from framework.config.validation import component_problems
from framework.launch.claim import print_problems
from framework.runtime.exits import Exit
from framework.runtime.log import LOGGER
from framework.runtime.problem import Problem
from framework.sweep.jobs import Job


def launcher_problems(node: dict[str, Any]) -> list[Problem]:
    """Return the problems of the node of a launcher. This imports its class."""
    if problems := component_problems("hydra.launcher", node, known=[]):
        return problems
    found = locate(node["_target_"])
    is_launcher = isinstance(found, type) and issubclass(found, Launcher)
    what = f"{node['_target_']} is not a launcher"
    return [] if is_launcher else [Problem("hydra.launcher._target_", what, "a class with hydra.plugins.launcher.Launcher")]


def run_line(config: DictConfig) -> int:
    """Run a job to its end, where its launcher has put it. Hydra calls this. The sweep has rehearsed the job."""
    line = [str(text) for text in HydraConfig.get().overrides.task]
    checked = checked_line(line)
    return print_problems(checked.problems) if checked.problems else start(line, checked=checked, is_rehearsed=True)


class _Loader:
    """What a launcher needs of Hydra's config loader: the configuration of a job. It travels to the job's process."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory.absolute())

    def load_sweep_config(self, master_config: DictConfig | None, sweep_overrides: list[str]) -> DictConfig:
        config = with_hydra(sweep_overrides)
        OmegaConf.set_readonly(config.hydra, False)
        quiet = {"version": 1, "root": None}  # a run has its own log
        settings = {
            "overrides.task": sweep_overrides,
            "sweep.dir": self._directory,
            "job_logging": quiet,
            "hydra_logging": quiet,
        }
        for key, value in settings.items():
            OmegaConf.update(config, f"hydra.{key}", value, merge=False, force_add=True)
        return config


class HydraPool:
    """A `Pool` whose jobs a launcher of Hydra runs: all that can start at once. It returns when they have ended."""

    def __init__(self, node: dict[str, Any], *, size: int, group: str, directory: Path) -> None:
        self.size, self._group, self._node = size, group, node
        self._loader = _Loader(directory / "launcher")
        self._ended: list[Job] = []
        self._num_started = 0

    @property
    def room(self) -> int:
        """The number of jobs that can start now."""
        return self.size - len(self._ended)

    @property
    def running(self) -> list[Job]:
        return self._ended

    def start(self, jobs: list[Job]) -> None:
        """Run jobs to their end."""
        lines = [[f"run.group={self._group}", *job.line] for job in jobs]
        try:
            returns = self._launcher(lines[0]).launch(lines, initial_job_idx=self._num_started)
        except Exception as error:  # of any launcher
            LOGGER.error("hydra/launcher: %s: %s", type(error).__name__, one_line(error))
            returns = [JobReturn() for _ in jobs]
        self._num_started += len(jobs)
        for job, ended in zip(jobs, returns):
            job.code = _code(ended)
        self._ended += jobs

    def _launcher(self, line: list[str]) -> Launcher:
        config = self._loader.load_sweep_config(None, line)
        OmegaConf.update(config, "hydra.launcher", self._node, merge=False, force_add=True)
        launcher: Launcher = instantiated(OmegaConf.to_container(config.hydra.launcher, resolve=True))
        context = HydraContext(config_loader=self._loader, callbacks=Callbacks())  # type: ignore[arg-type]  # the job calls callbacks
        launcher.setup(hydra_context=context, task_function=run_line, config=config)
        return launcher

    def stop(self, job: Job) -> None:
        """Do nothing: the job has ended."""

    def wait(self, *, timeout_s: float) -> list[Job]:
        """Return the jobs that have ended, with their exit codes."""
        ended, self._ended = self._ended, []
        return ended


def _code(ended: JobReturn) -> int:
    """Return the exit code of a job. It failed if its launcher has no code of it."""
    value = ended._return_value
    if ended.status == JobStatus.COMPLETED and isinstance(value, int):
        return value
    LOGGER.error("hydra/launcher: a job has no exit code%s", f": {type(value).__name__}: {value}" if value is not None else "")
    return Exit.FAILED
