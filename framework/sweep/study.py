"""Optuna's study of a search: where it is stored, how its trials are drawn, and how they are pruned."""

import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, OptunaError
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, PatientPruner, PercentilePruner
from optuna.pruners import SuccessiveHalvingPruner as AshaPruner
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study, StudyDirection
from optuna.trial import Trial
from sqlalchemy.exc import SQLAlchemyError

from framework.config.frozen_file import digest_of
from framework.runtime.exits import DiskFailed
from framework.runtime.secrets import redact
from framework.sweep.space import Dimension, Interval, Space, Values
from framework.sweep.sweeper import JOURNAL, Objective, Pruner, Sweeper

# --- where it is stored


def place_of_study(storage: str | None, directory: Path) -> Path | str:
    """Return the file in the sweep's directory that holds the study, or the URL of its database."""
    if storage is None:
        return directory / "search.db"
    return directory / f"search{_JOURNAL}" if storage == JOURNAL else storage


_JOURNAL = ".journal"


def open_study(sweeper: Sweeper, *, directory: Path, goals: list[Objective]) -> Study:
    """Open the study, or make it."""
    place = place_of_study(sweeper.storage, directory)
    name = "search" if isinstance(place, Path) else _name_in_database(directory)
    directions = [StudyDirection.MAXIMIZE if goal.mode == "max" else StudyDirection.MINIMIZE for goal in goals]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with disk_errors(place):
        return optuna.create_study(storage=_storage(place), study_name=name, directions=directions, load_if_exists=True)


def _name_in_database(directory: Path) -> str:
    """Return the study's name: of this directory alone, which has its runs and its workers' claims, whatever its path is."""
    link = directory / "study"
    with suppress(FileExistsError):
        os.symlink(f"sweep-{directory.name}-{secrets.token_hex(4)}", link)
    return os.readlink(link)


def _storage(place: Path | str) -> BaseStorage:
    if isinstance(place, Path) and place.suffix == _JOURNAL:
        return JournalStorage(JournalFileBackend(str(place)))
    url = place if isinstance(place, str) else f"sqlite:///{place}"
    return RDBStorage(url, engine_kwargs={} if url.startswith("sqlite") else {"pool_pre_ping": True})


@contextmanager
def disk_errors(place: Path | str) -> Iterator[None]:
    """Raise DiskFailed for what a storage raises: of a journal also for a line that is none."""
    of_journal = (OSError, ValueError) if str(place).endswith(_JOURNAL) else ()
    try:
        yield
    except (SQLAlchemyError, OptunaError, *of_journal) as error:
        ours = "; without it the search starts again, and finds its runs as they are" if isinstance(place, Path) else ""
        raise DiskFailed(redact(f"{place} cannot be used ({str(error).splitlines()[0]}){ours}")) from None


# --- how its trials are drawn


class TrialDraws:
    """Draws the values of trials.

    A draw follows from the seed, the trial's number, the key, and the trials before it, even if the search was killed.
    """

    def __init__(self, study: Study, sweeper: Sweeper, space: Space) -> None:
        self._study, self._sweeper, self._space = study, sweeper, space
        self._grid = space.combinations() if sweeper.sampler == "grid" else []

    def values(self, trial: Trial) -> Values:
        """Draw a trial's values; those that were drawn before it was interrupted stay."""
        self._study.pruner = NopPruner()  # with that of Hyperband, Optuna shows a sampler a part of the trials
        self._study.sampler = self._sampler(trial.number, self._space.dimensions[0])
        return self._space.choose(partial(self._draw, trial))

    def _draw(self, trial: Trial, dimension: Dimension) -> str:
        if dimension.name in trial.params:
            return str(trial.params[dimension.name])
        # TPE draws keys together: with the sampler of the first, also in a search that was killed between two keys
        _ = trial.relative_params
        self._study.sampler = self._sampler(trial.number, dimension)
        name, values = dimension.name, dimension.values
        if not isinstance(values, Interval):
            return str(trial.suggest_categorical(name, values))
        if isinstance(values.low, int) and isinstance(values.high, int):
            return str(trial.suggest_int(name, values.low, values.high, step=int(values.step or 1), log=values.log))
        return str(trial.suggest_float(name, values.low, values.high, step=values.step, log=values.log))

    def _sampler(self, number: int, dimension: Dimension) -> BaseSampler:
        seed = int(digest_of([self._sweeper.seed, number, dimension.name])[:8], 16)
        if self._sweeper.sampler == "tpe":
            return TPESampler(seed=seed)
        if self._sweeper.sampler == "random":
            return RandomSampler(seed)
        values = self._grid[number % len(self._grid)]
        fixed: dict[str, Any] = {one.name: values[one.key] for one in self._space.dimensions if one.applies(values)}
        with _experimental():
            return PartialFixedSampler(fixed, RandomSampler(seed))


# --- how they are pruned

_PRUNERS: dict[str, Callable[..., BasePruner]] = {
    "median": MedianPruner, "percentile": PercentilePruner, "asha": AshaPruner, "hyperband": HyperbandPruner,
    "patient": partial(PatientPruner, None), "none": NopPruner,
}  # fmt: skip


def pruner(settings: Pruner) -> BasePruner:
    """Return a new pruner: Optuna's remember what they have seen, which a search that was killed could not."""
    with _experimental():
        return _PRUNERS[settings.name](**settings.model_dump(exclude={"name"}))


@contextmanager
def _experimental() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield
