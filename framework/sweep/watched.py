"""A trial that is running: its evaluations are read as they come, and the pruner is asked after each."""

import os

from optuna.trial import Trial

from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import Row, rows_in
from framework.sweep.study import pruner
from framework.sweep.sweeper import Pruner

_JUDGED = "judged"  # a trial's attribute: the step after which the pruner was last asked, and whether it gave the trial up


class Watched:
    """What is known of a running trial."""

    def __init__(self, trial: Trial, directory: RunDirectory, *, monitor: str, settings: Pruner) -> None:
        self.trial = trial
        self.step = 0  # of the last evaluation
        self._settings = settings
        self._split, _, self._metric = monitor.partition("/")
        self._path = directory.metrics
        self._inode = self._offset = 0  # of the file, and in it: rows before it have been read
        self._reported = max(trial.storage.get_trial(trial._trial_id).intermediate_values, default=0)  # before a kill
        self._judged, self._is_hopeless = trial.user_attrs.get(_JUDGED, (0, False))
        if self._is_hopeless:
            self.step = self._judged

    def is_hopeless(self) -> bool:
        """Return whether the pruner has given the trial up, now or before."""
        is_over = self._is_hopeless or len(self.trial.study.directions) > 1  # several objectives are not reported
        for row in [] if is_over else self._new_rows():
            is_evaluation = row["split"] == self._split and self._metric in row
            # steps that a run repeats, after a rollback or when it is continued, have counted already
            if is_evaluation and row["step"] > max(self.step, self._judged, self._reported - 1):
                self.step = row["step"]
                if self._judge(row[self._metric]):
                    break
        return self._is_hopeless

    def _judge(self, value: float) -> bool:
        if self.step > self._reported:
            self.trial.report(value, self.step)
        self.trial.study.pruner = pruner(self._settings)
        self._is_hopeless = bool(self.trial.should_prune())  # else of numpy, which no journal takes
        self.trial.set_user_attr(_JUDGED, [self.step, self._is_hopeless])  # halving judges a step once
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
