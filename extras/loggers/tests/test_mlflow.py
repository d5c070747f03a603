"""MLflow's database holds what metrics.jsonl holds, once, also after an interruption."""

from pathlib import Path
from typing import Any

import pytest

from extras.loggers.mlflow import MLflow
from extras.loggers.tests.records import Scalars, assert_equal, scalars_of, when
from framework.loggers.sink import RunInfo
from framework.runs.metrics_file import MACHINE
from tests.harness import command, finished
from tests.test_loggers import DDP, RUN
from tests.test_resume import after_step, crash


def mlflow_scalars(client: Any, run_id: str) -> Scalars:
    """Return what MLflow holds; a step that is there twice is an error."""
    found: Scalars = {}
    for name in client.get_run(run_id).data.metrics:
        for metric in client.get_metric_history(run_id, name):
            assert (name, metric.step) not in found, f"{name} has step {metric.step} twice"
            found[name, metric.step] = metric.value
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)  # it makes a database
def test_mlflow_is_one_run_equal_to_metrics_jsonl_after_a_kill(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    line = [*RUN, *DDP, "logger=mlflow", "logger.mlflow.log_model=true", "logger.mlflow.timeout_s=120"]
    database = tmp_path / "runs" / "mlflow.db"
    dies = after_step(10, when(lambda: database.exists() and database.stat().st_size > 100_000, crash))
    assert command(*line, root=tmp_path / "runs", before=dies).code != 0
    run = finished(*line, root=tmp_path / "runs")
    client = MlflowClient(f"sqlite:///{database}")
    (held,) = client.search_runs([client.get_experiment_by_name("steadfast").experiment_id])
    found = mlflow_scalars(client, held.info.run_id)
    assert found.pop(("best/val/loss", 16)) == pytest.approx(run.summary["metrics"]["val"]["best"]["loss"])

    def exact(values: Scalars) -> Scalars:
        return {key: value for key, value in values.items() if key[0].partition("/")[2] not in MACHINE}

    assert_equal(exact(found), exact(scalars_of(run.rows)))
    assert held.info.status == "FINISHED" and held.data.params["seed"] == "0"
    assert held.data.params["model._target_"] == "models.mlp.MLP"
    assert [file.path for file in client.list_artifacts(held.info.run_id)] == ["model.safetensors"]


def mlflow_rows(folder: Path, *, step: int, values: dict[int, float]) -> None:
    """Let a sink record a run from a step on."""
    directory = folder / "runs" / "a" / "b"
    sink = MLflow(experiment="steadfast", uri=None, log_model=False, timeout_s=60)
    sink.open(RunInfo(directory, "b", "a", step, 10, {"seed": 0}, record_id="b-1", monitor="val/loss"))
    for at, value in values.items():
        sink.log({"step": at, "split": "train", "acc@1": value})


@pytest.mark.slow
def test_mlflow_has_the_values_of_a_step_that_was_taken_again_under_any_name(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    (tmp_path / "runs" / "a" / "b").mkdir(parents=True)
    metrics = tmp_path / "runs" / "a" / "b" / "metrics.jsonl"
    metrics.write_text("")
    mlflow_rows(tmp_path, step=0, values={1: 0.1, 2: 0.2, 3: 0.3})
    metrics.write_text('{"step": 1, "split": "train", "acc@1": 0.1}\n')
    mlflow_rows(tmp_path, step=1, values={2: 0.25, 3: 0.35})  # on another number of processes, for example
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (held,) = client.search_runs([client.get_experiment_by_name("steadfast").experiment_id])
    assert mlflow_scalars(client, held.info.run_id) == {
        ("train/acc_1", step): value for step, value in ((1, 0.1), (2, 0.25), (3, 0.35))
    }
