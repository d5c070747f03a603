"""Optuna's study of a search: its storage, and the draws of its trials."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import OptunaError
from optuna.pruners import NopPruner
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import Trial
from sqlalchemy.exc import SQLAlchemyError

from framework.config.frozen_file import digest_of
from framework.runtime.exits import DiskFailed
from framework.sweep.space import Dimension, Interval, Space, Values
from framework.sweep.sweeper import Objective, Sweeper, built_quietly

# --- the storage


def open_study(place: Path, *, name: str, goals: list[Objective]) -> Study:
    """Open the study in an SQLite file. Create it if it does not exist."""
    directions = [StudyDirection.MAXIMIZE if goal.mode == "max" else StudyDirection.MINIMIZE for goal in goals]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with disk_errors(place):
        return optuna.create_study(storage=f"sqlite:///{place}", study_name=name, directions=directions, load_if_exists=True)


@contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """Raise DiskFailed for errors of a storage."""
    try:
        yield
    except (SQLAlchemyError, OptunaError) as error:
        text = f"{place} cannot be used ({str(error).splitlines()[0]}); without it the search starts again, and reuses its runs"
        raise DiskFailed(text) from None


# --- the draws of trials


class TrialDraws:
    """The draws of the trials' values.

    A draw depends only on the seed, the trial's number, the key, and the trials before it, even if the search was killed.
    """

    def __init__(self, study: Study, sweeper: Sweeper, space: Space) -> None:
        self._study, self._sweeper, self._space = study, sweeper, space
        self._grid = space.combinations() if sweeper.is_grid else []

    def values(self, trial: Trial) -> Values:
        """Draw a trial's values. Keep values that were drawn before an interruption."""
        self._study.pruner = NopPruner()  # with the Hyperband pruner, Optuna shows a sampler only a part of the trials
        self._study.sampler = self._sampler(trial.number, self._space.dimensions[0])
        return self._space.choose(partial(self._draw, trial))

    def _draw(self, trial: Trial, dimension: Dimension) -> str:
        if dimension.name in trial.params:
            return str(trial.params[dimension.name])
        # TPE draws keys together: with the sampler of the first key, also if the search was killed between two keys
        _ = trial.relative_params
        self._study.sampler = self._sampler(trial.number, dimension)
        name, values = dimension.name, dimension.values
        if not isinstance(values, Interval):
            return str(trial.suggest_categorical(name, values))
        if isinstance(values.low, int) and isinstance(values.high, int):
            return str(trial.suggest_int(name, values.low, values.high, step=int(values.step or 1), log=values.log))
        return str(trial.suggest_float(name, values.low, values.high, step=values.step, log=values.log))

    def _sampler(self, number: int, dimension: Dimension) -> BaseSampler:
        seed = int(digest_of([self._sweeper.sampler, number, dimension.name])[:8], 16)
        if not self._sweeper.is_grid:
            return built_quietly({**self._sweeper.sampler, "seed": seed})  # type: ignore[no-any-return]
        values = self._grid[number % len(self._grid)]
        fixed: dict[str, Any] = {one.name: values[one.key] for one in self._space.dimensions if one.applies(values)}
        target = "optuna.samplers.PartialFixedSampler"
        return built_quietly({"_target_": target, "fixed_params": fixed, "base_sampler": RandomSampler(seed)})  # type: ignore[no-any-return]
