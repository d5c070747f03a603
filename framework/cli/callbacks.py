"""Hydra's callbacks (`hydra.callbacks`) around a run, a sweep, or a job of a sweep."""

from collections.abc import Iterator
from contextlib import contextmanager

from hydra._internal.callbacks import Callbacks
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from framework.config.compose import with_hydra
from framework.config.folders import config_name, enter_project
from framework.config.hydra_compose import has_callbacks
from framework.config.overrides import one_line
from framework.runtime.exits import Exit, Unfit
from framework.runtime.problem import Problem


@contextmanager
def callbacks(overrides: list[str], *, rank: int, is_job: bool) -> Iterator[JobReturn]:
    """Call `hydra.callbacks` on rank 0 before and after a run: on_run_start, on_job_start, on_job_end, on_run_end.

    The result's `return_value` is the exit code. For a job of a sweep (`is_job`), only the methods of a job are called. As in
    Hydra, an exception in a method is a warning.
    """
    ended = JobReturn(overrides=overrides)
    if rank or not has_callbacks(overrides):
        yield ended
        return
    found = _built(config := with_hydra(overrides))
    if not is_job:
        found.on_run_start(config=config, config_name=config_name())
    found.on_job_start(config=config, task_function=lambda config: None)
    ended.cfg, ended.hydra_cfg = config, OmegaConf.masked_copy(config, "hydra")
    try:
        yield ended
    finally:
        ended.status = JobStatus.COMPLETED if ended._return_value == Exit.FINISHED else JobStatus.FAILED
        found.on_job_end(config=config, job_return=ended)
        if not is_job:
            found.on_run_end(config=config, config_name=config_name())


@contextmanager
def multirun_callbacks(overrides: list[str]) -> Iterator[None]:
    """Call `hydra.callbacks` before and after a sweep: on_multirun_start, on_multirun_end. `overrides` is a job's line."""
    if not has_callbacks(overrides):
        yield
        return
    found = _built(config := with_hydra(overrides))
    found.on_multirun_start(config=config, config_name=config_name())
    try:
        yield
    finally:
        found.on_multirun_end(config=config, config_name=config_name())


def _built(config: DictConfig) -> Callbacks:
    enter_project()
    try:
        return Callbacks(config)
    except Exception as error:  # a user's class may raise anything
        expected = "nodes whose _target_ is a hydra.experimental.callback.Callback, with its arguments"
        raise Unfit(str(Problem("hydra.callbacks", f"cannot be built: {one_line(error)}", expected))) from error
