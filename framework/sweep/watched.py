"""A running trial. Its evaluations are read as they arrive, and the pruner decides after each."""

import os

from optuna.trial import Trial

from framework.config.schema import Node
from framework.runs.directory import RunDirectory
from framework.runs.metrics_file import Row, rows_in
from framework.sweep.sweeper import built_quietly

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
