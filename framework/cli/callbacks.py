"""Hydra's callbacks (`hydra.callbacks`) around a run, a sweep, or a job of a sweep."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from hydra._internal.callbacks import Callbacks
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from framework.config.code import code_of
from framework.config.compose import with_hydra
from framework.config.folders import config_name, enter_project
from framework.config.hydra_compose import hydra_node
from framework.config.identity import flat
from framework.config.overrides import one_line
from framework.runtime.exits import Exit, Unfit
from framework.runtime.problem import Problem


@contextmanager
def callbacks(overrides: list[str], *, around: Literal["run", "job", "multirun"], rank: int = 0) -> Iterator[JobReturn]:
    """Call `hydra.callbacks` on rank 0 before and after: on_run_start, on_job_start, on_job_end, on_run_end for a run.

    For a job of a sweep, only the methods of a job are called, and for a sweep on_multirun_start and on_multirun_end;
    `overrides` is then a job's line. The result's `return_value` is the exit code. As in Hydra, an exception in a method is a
    warning.
    """
    ended = JobReturn(overrides=overrides)
    if rank or not (settings := hydra_node(overrides)) or not settings.callbacks:
        yield ended
        return
    config = with_hydra(overrides)
    enter_project()
    try:
        found = Callbacks(config)
    except Exception as error:  # a user's class may raise anything
        expected = "nodes whose _target_ is a hydra.experimental.callback.Callback, with its arguments"
        raise Unfit(str(Problem("hydra.callbacks", f"cannot be built: {one_line(error)}", expected))) from error
    code_of(type(one).__module__ for one in found.callbacks)  # their modules must not count as the run's
    ended.cfg, ended.hydra_cfg = config, OmegaConf.masked_copy(config, "hydra")
    before = flat(OmegaConf.to_container(config))  # type: ignore[arg-type]  # keys are strings
    if around != "job":
        getattr(found, f"on_{around}_start")(config=config, config_name=config_name())
    if around != "multirun":
        found.on_job_start(config=config, task_function=lambda config: None)
    now = flat(OmegaConf.to_container(config))  # type: ignore[arg-type]
    if changed := [key for key in before | now if before.get(key) != now.get(key) and not key.startswith("hydra.")]:
        what = f"a callback changes {changed[0]}, but the configuration has been checked, and has named the run"
        raise Unfit(str(Problem("hydra.callbacks", what, "set it on the command line, or in a file")))
    try:
        yield ended
    finally:
        ended.status = JobStatus.COMPLETED if ended._return_value == Exit.FINISHED else JobStatus.FAILED
        if around != "multirun":
            found.on_job_end(config=config, job_return=ended)
        if around != "job":
            getattr(found, f"on_{around}_end")(config=config, config_name=config_name())
