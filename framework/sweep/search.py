"""A search: Optuna draws the parameters in this process; a trial is a run, and its objective is checkpoint.monitor."""

import os
from pathlib import Path

import optuna
from optuna.exceptions import OptunaError
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from framework.cli.run import checked_line
from framework.config.draft import Draft
from framework.config.frozen_file import digest_of
from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import Row, rows_in
from framework.runs.table import TableRow
from framework.runtime.exits import DiskFailed, Exit
from framework.runtime.log import LOGGER
from framework.sweep.jobs import Job, exit_code
from framework.sweep.line import Interval, Multirun, Values


class Search:
    """The trials, kept in `search.db` (SQLite), so that a killed search can continue.

    A draw follows from the seed, the trial's number, the key, and the trials before it, even if the search was killed.
    """

    def __init__(self, multirun: Multirun, *, monitor: str, mode: str, directory: Path) -> None:
        assert multirun.sweeper is not None
        self._multirun, self._sweeper, self._monitor = multirun, multirun.sweeper, monitor
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        database = directory / "search.db"
        try:
            self._study = optuna.create_study(
                storage=f"sqlite:///{database}",
                study_name="search",
                direction="maximize" if mode == "max" else "minimize",
                pruner=MedianPruner() if self._sweeper.pruner == "median" else NopPruner(),
                load_if_exists=True,
            )
            self._interrupted = self._study.get_trials(states=(TrialState.RUNNING,))
        except (SQLAlchemyError, OptunaError) as error:
            raise DiskFailed(f"{database} cannot be used ({str(error).splitlines()[0]}); without it the search starts again, "
                             "and finds its runs as they are") from None  # fmt: skip
        self._held: tuple[Job, Trial] | None = None
        self._running: dict[Job, _Watched] = {}
        self._codes: list[int] = []
        self._checked: dict[int, Draft] = {}

    @property
    def num_left(self) -> int:
        trials = self._study.trials
        return max(self._sweeper.n_trials, len(trials)) - sum(trial.state.is_finished() for trial in trials)

    def next(self) -> Job | None:
        if self._held is None:
            self._held = self._drawn()
        if self._held is None or any(self._held[0].directory.path == job.directory.path for job in self._running):
            return None  # of two trials that are the same run, the second takes the result of the first
        job, trial = self._held
        self._running[job] = _Watched(trial, job, monitor=self._monitor)
        self._held = None
        return job

    def _drawn(self) -> tuple[Job, Trial] | None:
        while self._interrupted or len(self._study.trials) < self._sweeper.n_trials:
            # Optuna's own name for a trial in the storage, which no public call gives
            trial = Trial(self._study, self._interrupted.pop(0)._trial_id) if self._interrupted else self._study.ask()
            values = {key: self._draw(trial, key) for key in self._multirun.swept}
            checked = self._check(trial.number, values)
            if checked.config is not None:
                return Job(values, line=self._multirun.line(values), config=checked.config), trial
            for problem in checked.problems:  # of this combination: its single values are valid
                LOGGER.error("trial %d: %s", trial.number, problem)
            self._study.tell(trial, state=TrialState.FAIL)
            self._codes.append(Exit.CONFIGURATION)
        return None

    def _draw(self, trial: Trial, key: str) -> str:
        """Draw a value, or return the value that was drawn before the trial was interrupted."""
        space = self._multirun.swept[key]
        # a sampler for this draw: a search that was killed between two draws continues with the second
        seed = int(digest_of([self._sweeper.seed, trial.number, key])[:8], 16)
        is_random = self._sweeper.sampler == "random"
        self._study.sampler = RandomSampler(seed) if is_random else TPESampler(seed=seed)
        if not isinstance(space, Interval):
            return str(trial.suggest_categorical(key, space))
        if isinstance(space.low, int) and isinstance(space.high, int):
            return str(trial.suggest_int(key, space.low, space.high, step=int(space.step or 1), log=space.log))
        return str(trial.suggest_float(key, space.low, space.high, step=space.step, log=space.log))

    def is_hopeless(self, job: Job) -> bool:
        return self._running[job].is_hopeless()

    def note(self, job: Job) -> None:
        """Report to Optuna how a trial has ended, except an interrupted trial, so that it is continued."""
        watched = self._running.pop(job)
        self._codes.append(job.code if job.code is not None else Exit.FAILED)
        objective = job.row().objective
        if watched.is_hopeless():  # even if it ended before it could be stopped: the next draw must follow from the
            self._study.tell(watched.trial, state=TrialState.PRUNED)  # results, and not from how fast they came
            self._codes.pop()
            LOGGER.info("trial %d pruned, at step %d: %s", watched.trial.number, watched.step, job)
        elif job.code == Exit.FINISHED and objective is not None:
            self._study.tell(watched.trial, objective)
        elif job.code != Exit.PREEMPTED:
            self._study.tell(watched.trial, state=TrialState.FAIL)

    def rows(self) -> list[TableRow]:
        swept = self._multirun.swept.keys()
        return [self._row(trial) for trial in self._study.trials if trial.params.keys() == swept]  # not if killed in a draw

    def _row(self, trial: FrozenTrial) -> TableRow:
        values = {key: str(trial.params[key]) for key in self._multirun.swept}
        checked = self._check(trial.number, values)
        state = {TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}.get(trial.state)
        if checked.config is None:
            run = checked.fields["run"]
            return TableRow(run.id, RunDirectory(Path(run.dir)), values, "failed", None, str(checked.problems[0]), None)
        return TableRow.read(checked.config.run, self._monitor, values, state=state)

    def _check(self, number: int, values: Values) -> Draft:
        if number not in self._checked:  # a check takes 50 ms, and each end of a trial asks for all trials
            self._checked[number] = checked_line(self._multirun.line(values))
        return self._checked[number]

    @property
    def code(self) -> int:
        """0 if any trial has finished: failures are a part of a search."""
        is_won = any(trial.state == TrialState.COMPLETE for trial in self._study.trials)
        return Exit.FINISHED if is_won and Exit.PREEMPTED not in self._codes else exit_code(self._codes)


class _Watched:
    """A trial that is running: reads its evaluations as they come, and asks the pruner after each."""

    def __init__(self, trial: Trial, job: Job, *, monitor: str) -> None:
        self.trial = trial
        self.step = 0  # of the last evaluation
        self._split, _, self._metric = monitor.partition("/")
        self._path = job.directory.metrics
        self._inode = self._offset = 0  # of the file, and in it: rows before it have been read
        self._reported = max(trial.storage.get_trial(trial._trial_id).intermediate_values, default=0)  # before a kill
        self._is_hopeless = False

    def is_hopeless(self) -> bool:
        """Return whether the pruner has given the trial up, now or before."""
        for row in self._new_rows() if not self._is_hopeless else []:
            is_evaluation = row["split"] == self._split and self._metric in row
            # steps that a run repeats, after a rollback or when it is continued, have counted already
            if not is_evaluation or row["step"] <= self.step or row["step"] < self._reported:
                continue
            self.step = row["step"]
            if self.step > self._reported:
                self.trial.report(row[self._metric], self.step)
            if self.trial.should_prune():
                self._is_hopeless = True
                break
        return self._is_hopeless

    def _new_rows(self) -> list[Row]:
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode:  # a run that continues replaces the file
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole + newline)
        return rows_in(whole)
