"""A search. Optuna draws the parameters in this process; a trial is a run, and its objective is checkpoint.monitor.

The evaluations of a running trial are read as they arrive, and the pruner decides after each.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from optuna.trial import FrozenTrial, Trial, TrialState

from framework.cli.run import checked_line
from framework.config.draft import Draft
from framework.config.schema import Node
from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import Row, rows_in
from framework.runs.table import TableRow
from framework.runtime.exits import Exit
from framework.runtime.log import LOGGER
from framework.sweep.jobs import Job, exit_code
from framework.sweep.line import Multirun
from framework.sweep.space import Values
from framework.sweep.study import TrialDraws, disk_errors, open_study
from framework.sweep.sweeper import Objective, built_quietly

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _stored(method: Callable[Concatenate["Search", _P], _R]) -> Callable[Concatenate["Search", _P], _R]:
    """Make a method raise DiskFailed for errors of the storage."""

    @wraps(method)
    def call(self: "Search", *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with disk_errors(self.place):
            return method(self, *args, **kwargs)

    return call


class Search:
    """The trials, in Optuna's storage. So a killed search can continue."""

    def __init__(self, multirun: Multirun, *, monitor: str, mode: str, directory: Path) -> None:
        assert multirun.sweeper is not None
        self._multirun, self._sweeper, self._monitor = multirun, multirun.sweeper, monitor
        self._goals = self._sweeper.goals or [Objective(monitor, mode)]
        self.place = directory / "search.db"
        self._study = open_study(self.place, name=self._sweeper.study_name or "search", goals=self._goals)
        self._draws = TrialDraws(self._study, self._sweeper, multirun.space)
        self._waiting: list[tuple[Job, Trial]] = []  # drawn, but another trial with the same run is active
        self._running: dict[Job, Watched] = {}
        self._had: set[int] = set()  # the numbers of the trials that this command has run
        self._codes: list[int] = []
        self._checked: dict[int, Draft] = {}
        self._trials()  # finds a damaged file now

    @_stored
    def _trials(self) -> list[FrozenTrial]:
        """Return the trials, without a trial that was killed before it drew, if there are more than n_trials by now."""
        num_trials = self._multirun.num_trials
        return [trial for trial in self._study.trials if trial.number < num_trials or trial.params]

    @property
    def num_left(self) -> int:
        trials = self._trials()
        return max(self._multirun.num_trials, len(trials)) - sum(trial.state.is_finished() for trial in trials)

    @_stored
    def next(self) -> Job | None:
        if not self._waiting and (drawn := self._drawn()) is not None:
            self._waiting.append(drawn)
        for job, trial in self._waiting:
            if all(job.directory.path != other.directory.path for other in self._running):  # else it uses the other's result
                self._waiting.remove((job, trial))
                self._running[job] = Watched(trial, job.directory, monitor=self._monitor, pruner=self._sweeper.chosen_pruner)
                return job
        return None

    def _drawn(self) -> tuple[Job, Trial] | None:
        while (trial := self._next_trial()) is not None:
            values = self._draws.values(trial)
            checked = self._check(trial.number, values)
            if checked.config is not None:
                return Job(values, line=self._multirun.line(values), config=checked.config), trial
            for problem in checked.problems:  # a problem of this combination: its single values are valid
                LOGGER.error("trial %d: %s", trial.number, problem)
            self._study.tell(trial, state=TrialState.FAIL)
            self._codes.append(Exit.CONFIGURATION)
        return None

    def _next_trial(self) -> Trial | None:
        """Return an interrupted trial, or else a new trial. Return None if this command has no trial to run."""
        num_trials = self._multirun.num_trials
        for frozen in self._study.get_trials(states=(TrialState.RUNNING,)):
            is_needed = frozen.number < num_trials or frozen.params
            if is_needed and frozen.number not in self._had:
                self._had.add(frozen.number)
                return Trial(self._study, frozen._trial_id)  # Optuna's own id, which no public function returns
        if len(self._study.trials) >= num_trials:
            return None
        trial = self._study.ask()
        self._had.add(trial.number)
        return trial

    @_stored
    def is_hopeless(self, job: Job) -> bool:
        return self._running[job].is_hopeless()

    @_stored
    def note(self, job: Job) -> None:
        """Report the end of a trial to Optuna. Do not report an interrupted trial, so that it is continued."""
        watched = self._running.pop(job)
        self._codes.append(job.code if job.code is not None else Exit.FAILED)
        values = self._values_of(job.directory)
        if watched.is_hopeless():  # even if it ended before it was stopped: the next draw must depend
            self._study.tell(watched.trial, state=TrialState.PRUNED)  # on the results, not on the order of their arrival
            self._codes.pop()
            LOGGER.info("trial %d pruned, at step %d: %s", watched.trial.number, watched.step, job)
        elif job.code == Exit.FINISHED and len(values) == len(self._goals):
            self._study.tell(watched.trial, list(values.values()))
        elif job.code != Exit.PREEMPTED:
            self._study.tell(watched.trial, state=TrialState.FAIL)

    def _values_of(self, directory: RunDirectory) -> dict[str, float]:
        summary = directory.read_summary()
        values = {goal.name: goal.value(summary, monitor=self._monitor) for goal in self._goals}
        return {name: value for name, value in values.items() if value is not None}

    @_stored
    def rows(self) -> list[TableRow]:
        best = {trial.number for trial in self._study.best_trials} if self._sweeper.objectives else set()
        rows = ((trial, self._values(trial)) for trial in self._trials())
        return [self._row(trial, values, is_best=trial.number in best) for trial, values in rows if values is not None]

    def _values(self, trial: FrozenTrial) -> Values | None:
        """Return the values that a trial has drawn. Return None if the trial was killed during a draw."""
        try:
            return self._multirun.space.choose(lambda dimension: str(trial.params[dimension.name]))
        except KeyError:
            return None

    def _row(self, trial: FrozenTrial, values: Values, *, is_best: bool) -> TableRow:
        checked = self._check(trial.number, values)
        state = {TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}.get(trial.state)
        if checked.config is None:
            run = checked.fields["run"]
            return TableRow(run.id, RunDirectory(Path(run.dir)), values, "failed", None, str(checked.problems[0]), None)
        row = TableRow.read(checked.config.run, self._monitor, values, state=state)
        if not self._sweeper.objectives:
            return row
        return replace(row, objectives=self._values_of(row.directory), is_pareto=is_best)

    def _check(self, number: int, values: Values) -> Draft:
        if number not in self._checked:  # a check takes 50 ms, and each end of a trial needs all trials
            self._checked[number] = checked_line(self._multirun.line(values))
        return self._checked[number]

    @property
    def code(self) -> int:
        """The exit code. It is 0 if any trial has finished, because failures are a part of a search."""
        is_won = any(trial.state == TrialState.COMPLETE for trial in self._trials())
        return Exit.FINISHED if is_won and Exit.PREEMPTED not in self._codes else exit_code(self._codes)


# --- a running trial


_JUDGED = "judged"  # a trial's attribute: the step of the pruner's last decision, and whether it gave up the trial


class Watched:
    """The known state of a running trial."""

    def __init__(self, trial: Trial, directory: RunDirectory, *, monitor: str, pruner: Node) -> None:
        self.trial = trial
        self.step = 0  # the step of the last evaluation
        self._pruner = pruner
        self._split, _, self._metric = monitor.partition("/")
        self._path = directory.metrics
        self._inode = self._offset = 0  # the file, and the position in it: earlier rows have been read
        self._reported = max(trial.storage.get_trial(trial._trial_id).intermediate_values, default=0)  # reported before a kill
        self._judged, self._is_hopeless = trial.user_attrs.get(_JUDGED, (0, False))
        if self._is_hopeless:
            self.step = self._judged

    def is_hopeless(self) -> bool:
        """Return whether the pruner has given up the trial, now or before."""
        is_over = self._is_hopeless or len(self.trial.study.directions) > 1  # several objectives are not reported
        for row in [] if is_over else self._new_rows():
            is_evaluation = row["split"] == self._split and self._metric in row
            # a run may repeat steps after a rollback or an interruption; these steps have counted already
            if is_evaluation and row["step"] > max(self.step, self._judged, self._reported - 1):
                self.step = row["step"]
                if self._judge(row[self._metric]):
                    break
        return self._is_hopeless

    def _judge(self, value: float) -> bool:
        if self.step > self._reported:
            self.trial.report(value, self.step)
        # a new pruner: Optuna's remember what they have seen, but a killed search would have forgotten it
        self.trial.study.pruner = built_quietly(self._pruner)
        self._is_hopeless = bool(self.trial.should_prune())  # otherwise a numpy type, which a journal cannot store
        self.trial.set_user_attr(_JUDGED, [self.step, self._is_hopeless])  # halving judges a step only once
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
