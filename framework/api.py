"""Steadfast from Python: run a configuration, look at one, load the model of a run."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.cli.run import checked_line, start
from framework.config.compose import compose_line
from framework.config.frozen_file import recall
from framework.config.modes import MODES
from framework.config.schema import RunConfig, completed
from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import Row, read_rows
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION, SIGNALS
from framework.runtime.problem import Problem


class ConfigurationError(ValueError):
    """A configuration is wrong; `problems` has every problem."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class RunFailed(RuntimeError):
    """A run has failed; `code` is the exit code that its command line would have."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"exit {code}: {what}")
        self.code = code


@dataclass(frozen=True)
class Run:
    """A run on the disk: what it was and what it measured."""

    directory: Path

    @property
    def config(self) -> dict[str, Any]:
        """The frozen configuration, as plain data."""
        return recall(self.directory)

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`: status, step, metrics, world size, ..."""
        return RunDirectory(self.directory).read_summary()

    @property
    def metrics(self) -> dict[str, dict[str, Row]]:
        """The last and the best row of each split, as in `metrics["test"]["last"]["loss"]`."""
        return self.summary.get("metrics", {})

    @property
    def rows(self) -> list[Row]:
        """All rows of `metrics.jsonl`, in order."""
        return read_rows(RunDirectory(self.directory).metrics)

    def dataset(self) -> Any:
        """Return the dataset that the run was trained on: `info`, `load(split)`, `transform` (see framework/data/source.py).

        No file is read yet. Of code of your own: in its project's folder. ValueError if the configuration is damaged.
        """
        from framework.build.components import dataset

        return dataset(_complete(self.directory).dataset)


def compose(*overrides: str) -> RunConfig:
    """Return the complete configuration of a command line.

    No model is built. ConfigurationError if anything is wrong that shows without a model; `run` finds the rest.
    """
    checked = checked_line(list(overrides))
    if checked.config is None:
        raise ConfigurationError(checked.problems)
    return checked.config


def run(*overrides: str) -> Run:
    """Do what `steadfast OVERRIDES` does, in this process and those that it starts, and return the run.

    Main thread only. A run that is finished already is returned as it is; one that a signal has stopped is returned with the
    status `preempted`, and the same call continues it. ConfigurationError if anything is wrong with the configuration;
    RunFailed if the run fails.
    """
    config = compose(*overrides)
    if not MODES[config.mode].worker:
        raise ConfigurationError([Problem("mode", f"{config.mode} prints, and runs nothing", "the command line")])
    with _as_before():
        code = start(list(overrides))
    done = Run(Path(config.run.dir))
    if code not in (Exit.FINISHED, Exit.PREEMPTED):
        raise RunFailed(code, str(done.summary.get("error") or "what was wrong is on standard error"))
    return done


def _complete(directory: Path) -> RunConfig:
    """Return a run's configuration, with the defaults of keys that came later. ValueError if it is missing or damaged."""
    return RunConfig.model_validate(completed(recall(directory), compose_line([]).config))


@contextmanager
def _as_before() -> Iterator[None]:
    """Leave this process as it was: signals, standard streams, the log, torch's generator."""
    import torch

    handlers, streams = {signum: signal.getsignal(signum) for signum in SIGNALS}, (sys.stdout, sys.stderr)
    logs, propagates = list(LOGGER.handlers), LOGGER.propagate
    PREEMPTION.reset()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        sys.stdout, sys.stderr = streams
        LOGGER.handlers[:], LOGGER.propagate = logs, propagates
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def load(directory: str | os.PathLike[str], *, checkpoint: int | str = "final") -> Any:
    """Return the trained model of a run (a torch.nn.Module, on the CPU, in evaluation), ready to be called.

    `checkpoint`: `final` weights, those of the `last` or `best` checkpoint, of a step, or of a file. ValueError if
    `directory` is no run; NoValidCheckpoint if its weights are missing, damaged, or of another model.
    """
    from framework.build.training import Builder
    from framework.distributed.world import World
    from framework.modes.load_run import load_run

    path = Path(directory)
    config = _complete(path).with_run(dir=str(path), checkpoint=checkpoint)
    world = World.start(Environment(), backend="gloo", timeout_s=60.0, scratch=None)
    with _as_before():
        return load_run(Builder(config, world=world)).module.eval()
