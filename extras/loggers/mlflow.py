"""MLflow: one MLflow run for all ranks and all resumes of a run."""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from extras.loggers.shared import folder_of_runs
from framework.config.identity import flat
from framework.loggers.sink import RunInfo, replay
from framework.runs.media import Media
from framework.runs.metrics_file import Row, best_of_monitor, scalars

_MOST_METRICS = 1000  # per request
_LONGEST_PARAMETER = 6000  # in characters


def _database(root: Path) -> Path:
    """Return the database of all runs below `root`. A complete database gets its name: MLflow cannot use a partial one."""
    from mlflow import MlflowClient

    path = root / "mlflow.db"
    if not path.exists():
        made = root / f".mlflow.{os.getpid()}.db"
        made.unlink(missing_ok=True)
        MlflowClient(f"sqlite:///{made}").search_experiments()
        with suppress(FileExistsError):  # another run was faster
            os.link(made, path)
        made.unlink()
    return path


def _name(text: str) -> str:
    """Return a metric's name with only the characters that MLflow accepts."""
    return re.sub(r"[^\w\-./ ]", "_", text.replace(":", "/"))


@dataclass(kw_only=True)
class MLflow:
    """MLflow. `uri` is a tracking server or database.

    With null, it is MLFLOW_TRACKING_URI, else `mlflow.db` in the folder of all runs. `timeout_s` limits the time in which the
    server must receive the remaining data at the end.
    """

    extra: ClassVar = "mlflow"  # the extra that installs the package

    experiment: str
    uri: str | None
    log_model: bool
    timeout_s: float

    def open(self, run: RunInfo) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        given = self.uri or os.environ.get("MLFLOW_TRACKING_URI")
        root = folder_of_runs(run)
        self._client = MlflowClient(given or f"sqlite:///{_database(root)}")
        self._info = run
        artifacts = None if given else str(root / "mlartifacts")  # beside the database, not in the working directory
        with suppress(MlflowException):  # it exists already
            self._client.create_experiment(self.experiment, artifact_location=artifacts)
        found = self._client.get_experiment_by_name(self.experiment)
        if found is None:
            raise ValueError(f"experiment {self.experiment} does not exist, and cannot be created")
        experiment = found.experiment_id
        for earlier in self._client.search_runs([experiment], filter_string=f"tags.`steadfast.record` = '{run.record_id}'"):
            self._client.delete_run(earlier.info.run_id)  # it may have steps that the run repeats; no step can be replaced
        made = self._client.create_run(experiment, run_name=f"{run.name}/{run.run_id}", tags=self._tags(run))
        self._id = made.info.run_id
        self._log_parameters(run.config)
        replay(self, run)

    def _tags(self, run: RunInfo) -> dict[str, str]:
        commit = {"mlflow.source.git.commit": run.commit} if run.commit else {}
        group = {"steadfast.group": run.group} if run.group else {}
        return {"steadfast.record": run.record_id, "steadfast.run": str(run.directory.resolve())} | commit | group

    def _log_parameters(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        given = [Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in flat(config).items()]
        for start in range(0, len(given), 100):  # per request
            self._client.log_batch(self._id, params=given[start : start + 100])

    def log(self, row: Row) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        found = [Metric(_name(name), value, now, row["step"]) for name, value in scalars(row).items()]
        for start in range(0, len(found), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=found[start : start + _MOST_METRICS])

    def media(self, item: Media) -> None:
        self._client.log_artifact(self._id, str(item.path), f"media/{item.name}")

    def close(self, summary: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        best, _ = best_of_monitor(summary)
        if best is not None:
            metric = Metric(_name(f"best/{summary['monitor']}"), best, int(1000 * time.time()), summary["step"])
            self._client.log_batch(self._id, metrics=[metric])
        weights = self._info.directory / "model.safetensors"
        if self.log_model and summary["status"] == "finished" and weights.is_file():
            self._client.log_artifact(self._id, str(weights))
        ends = {"finished": "FINISHED", "failed": "FAILED", "preempted": "KILLED"}
        self._client.set_terminated(self._id, status=ends.get(summary["status"], "KILLED"))
