"""Steadfast from Python: run a configuration, examine a run, load the model of a run."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework import live
from framework.cli.run import checked_line, start
from framework.config.code import loading
from framework.config.compose import forget_files
from framework.config.frozen_file import recall
from framework.config.modes import MODES
from framework.config.schema import RunConfig
from framework.launch.decision import PRINTED
from framework.preflight.check import edited_problems
from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import Row, read_rows
from framework.runtime.environment import Environment
from framework.runtime.exits import Exit
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION, SIGNALS
from framework.runtime.problem import Problem
from framework.runtime.program import start_problems


class ConfigurationError(ValueError):
    """A configuration is wrong. `problems` contains every problem."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class RunFailed(RuntimeError):
    """A run has failed. `code` is the exit code of the same command line."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"exit {code}: {what}")
        self.code = code


@dataclass(frozen=True)
class Run:
    """A run on the disk: its configuration and its measurements."""

    directory: Path
    began: float | None = None  # of a draft: when it started

    @property
    def config(self) -> dict[str, Any]:
        """The frozen configuration, as plain data."""
        return recall(self.directory)

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`: status, step, metrics, world size, ... ValueError if another draft is in its place."""
        summary = RunDirectory(self.directory).read_summary()
        if self.began is not None and summary.get("began") != self.began:
            raise ValueError(f"{self.directory}: another draft has replaced this one (keep what you need of a draft before)")
        return summary

    @property
    def metrics(self) -> dict[str, dict[str, Row]]:
        """The last and the best row of each split, as in `metrics["test"]["last"]["loss"]`."""
        return self.summary.get("metrics", {})

    @property
    def rows(self) -> list[Row]:
        """All rows of `metrics.jsonl`, in order."""
        return read_rows(RunDirectory(self.directory).metrics)

    def dataset(self) -> Any:
        """Return the run's training dataset, with `info`, `load(split)` and `transform` (see framework/data/source.py).

        This reads no file yet. For a dataset class of your own, call it in the folder of its project. Raise ValueError if the
        configuration is damaged.
        """
        from framework.build.components import dataset

        return dataset(_complete(self.directory).dataset)


@loading()
def compose(*overrides: str, **keys: Any) -> RunConfig:
    """Return the complete configuration of a command line; `keys` are overrides too, as in `trainer={"max_steps": 20}`.

    No model is built. Raise ConfigurationError for problems that are visible without a model; `run` finds the others.
    """
    if problems := start_problems():
        raise ConfigurationError(problems)
    forget_files()
    if wrong := [text for text in overrides if not isinstance(text, str)]:
        what = f"is a {type(wrong[0]).__name__}, not a text"
        raise ConfigurationError(
            [Problem(repr(wrong[0]), what, "one argument for each word, as in run('model=mlp', 'seed=1')")]
        )
    words, problems = live.words_of(keys)
    problems += edited_problems(live.module_names(keys))
    checked = checked_line([*overrides, *words])
    if checked.config is None or problems:
        raise ConfigurationError(problems + checked.problems)
    return checked.config


@loading()
def run(*overrides: str, **keys: Any) -> Run:
    """Do what `steadfast OVERRIDES` does, in this process and its children, and return the run.

    `keys` are overrides too: `trainer={"max_steps": 20}`, `parallel="ddp"`. Components may be objects (framework/live.py). Such
    a run is a draft; at its end, the model has the trained weights. Main thread only. A run that has finished already is
    returned unchanged. A run that a signal has stopped is returned with the status `preempted`, and the same call continues it.
    Raise ConfigurationError if the configuration is wrong, and RunFailed if the run fails.
    """
    config = compose(*overrides, **keys)
    if not MODES[config.mode].worker:
        raise ConfigurationError([Problem("mode", f"{config.mode} prints, and runs nothing", "the command line")])
    with _as_before():
        PRINTED.clear()
        code = start([*overrides, *live.words_of(keys)[0]])
    done = Run(Path(config.run.dir))
    if code not in (Exit.FINISHED, Exit.PREEMPTED):
        raise RunFailed(code, "\n".join(PRINTED) or str(done.summary.get("error") or "the problem is on standard error"))
    if code == Exit.FINISHED and hasattr(keys.get("model"), "load_state_dict"):
        keys["model"].load_state_dict(load(done.directory).state_dict())
    return Run(done.directory, done.summary.get("began")) if config.draft else done


def _complete(directory: Path) -> RunConfig:
    """Return a run's configuration, with defaults for newer keys. Raise ValueError if it is missing or damaged."""
    return RunConfig.model_validate(recall(directory))


@contextmanager
def _as_before() -> Iterator[None]:
    """Restore the state of this process at the end: signals, standard streams, the log, torch's generator."""
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
    """Return the trained model of a run: a torch.nn.Module on the CPU, in evaluation mode, ready for calls.

    `checkpoint`: `final` for the final weights, or the weights of the `last` or `best` checkpoint, of a step, or of a file.
    Raise ValueError if `directory` is not a run, and NoValidCheckpoint if the weights are missing, damaged, or of another
    model.
    """
    from framework.build.training import Builder
    from framework.distributed.world import World
    from framework.modes.load_run import load_run

    path = Path(directory)
    config = _complete(path).with_run(dir=str(path), checkpoint=checkpoint)
    world = World.start(Environment(), backend="gloo", timeout_s=60.0, scratch=None)
    try:
        with _as_before():
            return load_run(Builder(config, world=world)).module.eval()
    except ValueError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise ValueError(f"{error}; the folder of the run's project must be on sys.path") from error
        raise
