"""A search. Optuna draws the parameters in this process; a trial is a run, and its objective is checkpoint.monitor.

The evaluations of a running trial are read as they arrive, and the pruner decides after each.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal

import optuna
from optuna.exceptions import OptunaError
from optuna.pruners import NopPruner
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from framework.cli.run import checked_line
from framework.config.draft import Draft
from framework.config.frozen_file import digest_of
from framework.config.schema import Node
from framework.config.trainer import CheckpointSection
from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import Row, rows_in
from framework.runs.table import TableRow
from framework.runtime.exits import DiskFailed, Exit
from framework.runtime.log import LOGGER
from framework.runtime.preemption import PREEMPTION
from framework.sweep.jobs import Job, exit_code
from framework.sweep.launchers import OwnLauncher, Runner
from framework.sweep.line import Multirun
from framework.sweep.space import Values
from framework.sweep.sweeper import Sweeper, built_quietly


@contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """Raise DiskFailed for errors of the storage."""
    try:
        yield
    except (SQLAlchemyError, OptunaError) as error:
        what = f"{place} cannot be used ({str(error).splitlines()[0]})"
        raise DiskFailed(f"{what}; without it the search starts again, and reuses its runs") from None


class Search:
    """The jobs of a search: its trials, in Optuna's storage in an SQLite file, so that a killed search can continue.

    The draws of a trial depend only on the seed, the trial's number, and the results of the trials before its batch.
    """

    def __init__(self, multirun: Multirun, *, saving: CheckpointSection, place: Path) -> None:
        assert isinstance(multirun.sweeper, Sweeper)
        self._multirun, self._sweeper, self._monitor = multirun, multirun.sweeper, saving.monitor
        self._num_trials = multirun.sweeper.n_trials
        self._direction: Literal["minimize", "maximize"] = "maximize" if saving.direction == "max" else "minimize"
        self._codes: list[int] = []
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        name = self._sweeper.study_name or "search"
        self.study = optuna.create_study(
            storage=f"sqlite:///{place}", study_name=name, direction=self._direction, load_if_exists=True
        )
        self.trials()  # finds a damaged file now

    def trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    @property
    def num_left(self) -> int:
        """The number of trials without a result."""
        return self._num_trials - sum(trial.state.is_finished() for trial in self.trials()[: self._num_trials])

    def batch(self, size: int) -> list[FrozenTrial]:
        """Return the next trials to run. The interrupted trials of a batch, also of another command, are its rest."""
        running = [trial.number for trial in self.trials() if trial.state == TrialState.RUNNING]
        first = min([*running, len(self.trials())])
        end = min((first // size + 1) * size, self._num_trials)
        for number in range(len(self.trials()), end):
            self._draw(number)
        return [trial for trial in self.trials()[first:end] if trial.state == TrialState.RUNNING]

    def _draw(self, number: int) -> None:
        """Draw a trial in memory, and store it at once: a killed search has no trial with half of its parameters."""
        seed = int(digest_of([self._sweeper.sampler, number])[:8], 16)
        sampler = built_quietly({**self._sweeper.sampler, "seed": seed})
        # with the Hyperband pruner, Optuna would show the sampler only a part of the trials
        memory = optuna.create_study(sampler=sampler, pruner=NopPruner(), direction=self._direction)
        memory.add_trials(self.trials())
        memory.ask(dict(self._multirun.space))
        self.study.add_trial(memory.trials[-1])

    def run(self, runner: Runner) -> None:
        """Draw batches of trials and run them, until all have a result, or a trial was interrupted."""
        size = self._sweeper.n_jobs or (runner.launcher.n_jobs if isinstance(runner.launcher, OwnLauncher) else 1)
        while self.num_left and Exit.PREEMPTED not in self._codes and not PREEMPTION.requested:
            watched = {job: watch for trial in self.batch(size) for job, watch in self._job(trial)}
            firsts = {*{job.directory.path: job for job in reversed(watched)}.values()}  # of the trials with the same run
            for part in firsts, watched.keys() - firsts:
                runner.run([job for job in watched if job in part], should_stop=lambda job: watched[job].is_hopeless())  # noqa: B023
            for job, watch in watched.items():
                self._tell(job, watch)

    def _job(self, trial: FrozenTrial) -> Iterator[tuple[Job, "Watched"]]:
        """Yield the job of a trial. Record a trial with a problem as failed: its single values are valid, but not together."""
        values = self._values(trial)
        line = self._multirun.line(values)
        checked = _checked(*line)
        if checked.config is not None:
            job = Job(values, line=line, config=checked.config)
            handle = Trial(self.study, trial._trial_id)  # Optuna's own id, which no public function returns
            yield job, Watched(handle, job.directory, monitor=self._monitor, pruner=self._sweeper.pruner)
            return
        for problem in checked.problems:
            LOGGER.error("trial %d: %s", trial.number, problem)
        self.study.tell(trial.number, state=TrialState.FAIL)
        self._codes.append(Exit.CONFIGURATION)

    def _tell(self, job: Job, watched: "Watched") -> None:
        """Report the end of a trial to Optuna. Do not report an interrupted trial, so that it is continued."""
        code, number, value = job.code or Exit.FINISHED, watched.trial.number, job.row().objective
        if watched.is_hopeless():  # even if it ended before it was stopped: the next draw must depend
            LOGGER.info("trial %d pruned, at step %d: %s", number, watched.step, job)  # on results, not on their times
            return
        self._codes.append(code)
        if code == Exit.FINISHED and value is not None:
            self.study.tell(number, value)
        elif code != Exit.PREEMPTED:
            self.study.tell(number, state=TrialState.FAIL)

    def rows(self) -> list[TableRow]:
        """Return the states of the trials that have been drawn."""
        return [self._row(trial) for trial in self.trials()]

    def _values(self, trial: FrozenTrial) -> Values:
        return {key: str(trial.params[key]) for key in self._multirun.space}

    def _row(self, trial: FrozenTrial) -> TableRow:
        values = self._values(trial)
        checked = _checked(*self._multirun.line(values))
        state = {TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}.get(trial.state)
        if checked.config is None:
            run = checked.fields["run"]
            return TableRow(run.id, RunDirectory(Path(run.dir)), values, "failed", None, str(checked.problems[0]), None)
        return TableRow.read(checked.config.run, values, state=state)

    @property
    def code(self) -> int:
        """The exit code. It is 0 if any trial has finished, because failures are a part of a search."""
        is_stopped = Exit.PREEMPTED in self._codes or (PREEMPTION.requested and self.num_left > 0)
        states = {trial.state for trial in self.trials()}
        of_failed = exit_code(self._codes) or (
            Exit.FAILED if TrialState.FAIL in states else Exit.FINISHED
        )  # before this command
        return Exit.PREEMPTED if is_stopped else Exit.FINISHED if TrialState.COMPLETE in states else of_failed


@cache  # a check takes 50 ms, and each end of a trial needs all trials
def _checked(*line: str) -> Draft:
    return checked_line([*line])


# --- a running trial


class Watched:
    """The known state of a running trial."""

    def __init__(self, trial: Trial, directory: RunDirectory, *, monitor: str, pruner: Node) -> None:
        self.trial = trial
        self.step = 0  # the step of the last evaluation
        self._pruner = pruner
        self._split, _, self._metric = monitor.partition("/")
        self._path = directory.metrics
        self._inode = self._offset = 0  # the file, and the position in it: earlier rows have been read
        self._reported = trial.storage.get_trial(trial._trial_id).last_step or 0  # before a kill; it may not have been judged
        self._is_hopeless = False

    def is_hopeless(self) -> bool:
        """Return whether the pruner has given up the trial, now or before."""
        for row in [] if self._is_hopeless else self._new_rows():
            is_evaluation = row["split"] == self._split and self._metric in row
            # a run may repeat steps after a rollback or an interruption; these steps have counted already
            if is_evaluation and row["step"] > max(self.step, self._reported - 1):
                self.step = row["step"]
                if self._judge(row[self._metric]):
                    break
        return self._is_hopeless

    def _judge(self, value: float) -> bool:
        if self.step > self._reported:
            self.trial.report(value, self.step)
        # a new pruner: Optuna's remember what they have seen, but a killed search would have forgotten it
        self.trial.study.pruner = built_quietly(self._pruner)
        self._is_hopeless = self.trial.should_prune()
        if self._is_hopeless:
            self.trial.study.tell(self.trial, state=TrialState.PRUNED)
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
        return [*rows_in(whole.splitlines())]
