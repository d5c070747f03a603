"""The sinks say what metrics.jsonl says, once, also after interruptions; one that fails does not end the run."""

import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from extras.loggers.mlflow import MLflow
from extras.loggers.tensorboard import TensorBoard
from extras.loggers.wandb import Wandb
from framework.data.synthetic import Synthetic
from framework.loggers import background
from framework.loggers.sink import RunInfo
from framework.runs.metrics_file import MACHINE
from framework.training.loop import Trainer
from tests.harness import (
    Ended,
    after_each,
    assert_same_bits,
    before_each,
    command,
    files_below,
    finished,
    once,
    refused,
    together,
    wait_for,
)
from tests.test_resume import after_step, crash, preempt, preempted
from tests.wandb_server import WandbServer, wandb_server

RUN = [
    "dataset=synthetic", "dataset.num_train=64", "dataset.num_val=20", "dataset.num_test=20", "dataset.image_size=8",
    "model=mlp", "model.dim=8", "global_batch_size=16", "trainer.max_epochs=4", "trainer.log_every=1",
    "trainer.eval_every=5", "checkpoint.every=4",
]  # fmt: skip
DDP = ["parallel=ddp", "launch.nproc_per_node=2"]


def base() -> Ended:
    return once(*RUN)


Scalars = dict[tuple[str, int], float]  # (SPLIT/METRIC, step) -> value


def scalars_of(rows: list[dict[str, Any]]) -> Scalars:
    return {
        (f"{row['split']}/{name}", row["step"]): value
        for row in rows
        for name, value in row.items()
        if name not in ("step", "split")
    }


def tensorboard_events(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "images": 0, "tensors": 0, "histograms": 0}
    return EventAccumulator(str(directory / "tensorboard"), size_guidance=everything).Reload()


def tensorboard_scalars(directory: Path, *, splits: tuple[str, ...] = ("train", "val", "test")) -> Scalars:
    """Return what is in the event files; a step that is there twice is an error."""
    reader = tensorboard_events(directory)
    found: Scalars = {}
    for tag in reader.Tags()["scalars"]:
        for event in reader.Scalars(tag) if tag.split("/")[0] in splits else []:
            assert (tag, event.step) not in found, f"{tag} has step {event.step} twice"
            found[tag, event.step] = event.value
    return found


def wandb_records(file: Path) -> Iterator[Any]:
    """Read a `.wandb` file: records in LevelDB's log format, after a header of 7 bytes; each a protocol buffer."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no room for a header in this block
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def wandb_rows(file: Path) -> Scalars:
    """Return what a `.wandb` file holds of rows; a step that goes backwards is an error."""
    found: Scalars = {}
    steps = [0]
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            steps.append(row["_step"])
            found |= {(name, row["_step"]): value for name, value in row.items() if name[0] != "_"}
    assert steps == sorted(set(steps))
    return found


def wandb_summary(file: Path) -> dict[str, Any]:
    updates = [item for record in wandb_records(file) for item in record.summary.update]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


def wandb_run(file: Path) -> Any:
    return next(record.run for record in wandb_records(file) if record.WhichOneof("record_type") == "run")


def assert_equal(actual: Scalars, expected: Scalars) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key  # event files hold float32


# --- TensorBoard


def test_tensorboard_holds_each_step_once_after_kills(tmp_path: Path) -> None:
    line, root = [*RUN, *DDP, "logger=tensorboard"], tmp_path / "runs"
    early = after_step(3, when(lambda: written(tmp_path, "events.*"), crash))  # before the first checkpoint
    for fault in (early, after_step(6, crash), after_step(11, crash)):  # those of steps 4 and 8
        command(*line, "launch.max_restarts=0", root=root, before=fault)
    run = finished(*line, root=root)
    assert run.summary["restarts"] == 3
    assert_equal(tensorboard_scalars(run.directory), scalars_of(run.rows))


@pytest.mark.slow
def test_tensorboard_gets_back_what_a_kill_has_lost_of_the_steps_before_the_checkpoint(tmp_path: Path) -> None:
    def lose() -> None:
        TensorBoard.log = lambda self, row: None  # as a buffer that is never written
        after_step(6, crash)()

    line = [*RUN, "logger=tensorboard"]
    assert command(*line, root=tmp_path / "runs", before=lose).code == -signal.SIGKILL
    run = finished(*line, root=tmp_path / "runs")
    assert "continuing from" in run.output
    assert_equal(tensorboard_scalars(run.directory), scalars_of(run.rows))


@pytest.mark.slow
def test_tensorboard_has_the_hparams_the_final_and_best_metrics_and_the_first_images_once_after_a_resume(
    tmp_path: Path,
) -> None:
    from PIL import Image
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    line = [*RUN, "logger=tensorboard", "optimizer.lr=0.01"]
    preempted(*line, at=6, root=tmp_path / "runs")
    run = finished(*line, root=tmp_path / "runs")
    reader = tensorboard_events(run.directory)

    def hparams(tag: str) -> Any:
        return HParamsPluginData.FromString(reader.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content)

    values = hparams("session_start_info").session_start_info.hparams
    assert values["optimizer.lr"].number_value == 0.01 and values["model._target_"].string_value == "models.mlp.MLP"
    measured = {info.name.tag for info in hparams("experiment").experiment.metric_infos}
    best = run.summary["metrics"]["val"]["best"]["loss"]
    columns = {f"{split}/{name}" for split in ("train", "val", "test") for name in ("loss", "accuracy", "top5")}
    assert measured == {"best/val/loss", *columns}
    assert_equal(tensorboard_scalars(run.directory, splits=("final", "best")), {("best/val/loss", 16): best})
    assert {tag.partition("/")[0] for tag in reader.Tags()["scalars"]} == {"train", "val", "test", "best"}
    (event,) = reader.Images("samples")
    shown = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
    squares = {shown[y : y + 8, x : x + 8].tobytes() for y in range(shown.shape[0] - 7) for x in range(shown.shape[1] - 7)}
    images, _ = Synthetic(num_train=64, num_val=20, num_test=20, image_size=8).load("train").gather(np.arange(8))
    assert all(image.transpose(1, 2, 0).tobytes() in squares for image in images)


HISTOGRAMS = [*RUN, "part=histograms", "part.histograms.every=5", "part.histograms.bins=7"]


def lists_of(run: Ended) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_histograms_are_those_of_the_whole_tensors_after_an_interruption(tmp_path: Path) -> None:
    line = [*HISTOGRAMS, "parallel=fsdp", "launch.nproc_per_node=2", "logger=[tensorboard,wandb]", "logger.wandb.mode=offline"]
    preempted(*line, at=6, root=tmp_path / "runs")
    run = finished(*line, root=tmp_path / "runs")
    rows = {row["step"]: row for row in lists_of(run) if row["split"] == "train"}
    assert {step for step, row in rows.items() if any("histogram" in name for name in row)} == {5, 10, 15}
    held = tensorboard_events(run.directory)
    for kind in ("weight", "gradient"):
        for name, tensor in run.weights.items():
            lowest, highest, counts = rows[15][f"{kind}_histogram:{name}"]
            assert len(counts) == 7 and sum(counts) == tensor.numel() and lowest <= highest
            assert [event.step for event in held.Histograms(f"{kind}s/{name}")] == [5, 10, 15]
            shown = held.Histograms(f"{kind}s/{name}")[-1].histogram_value
            assert shown.num == tensor.numel() and shown.min == pytest.approx(lowest)
    name = sorted(run.weights)[0]
    logged = [json.loads(item.value_json) for record in wandb_records(wandb_files(run.directory)[-1])
              if record.WhichOneof("record_type") == "history" for item in record.history.item
              if list(item.nested_key) == [f"weights/{name}", "values"]]  # fmt: skip
    assert logged == [rows[step][f"weight_histogram:{name}"][2] for step in (5, 10, 15)]


def test_histograms_of_nothing_are_refused() -> None:
    assert "parameters=laye: matches no trained parameter" in refused(
        *HISTOGRAMS, "part.histograms.parameters=[laye]", "rehearse=true"
    )


# --- MLflow


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


def test_tensorboard_shows_the_first_training_texts(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("Tyger Tyger, burning bright,\n  In the forests of the night;\n" * 40)
    run = finished(
        "dataset=text", f"dataset.root={tmp_path}", "dataset.pattern=poem.txt", "dataset.seq_len=32", "model=gpt",
        "model.dim=8", "model.num_layers=1", "model.num_heads=1", "global_batch_size=8", "trainer.max_steps=1",
        "logger=tensorboard", root=tmp_path / "runs",
    )  # fmt: skip
    (event,) = tensorboard_events(run.directory).Tensors("samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text.startswith("    Tyger Tyger, burning bright,\n      I\n\n---\n\n    n the forests of the night;")


# --- Weights & Biases, offline


OFFLINE = ["logger=wandb", "logger.wandb.mode=offline"]


def wandb_files(directory: Path) -> list[Path]:
    return sorted((directory / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def written(folder: Path, pattern: str) -> bool:
    return any(path.stat().st_size for path in files_below(folder, pattern))


def when(condition: Callable[[], bool], act: Callable[[], None]) -> Callable[[], None]:
    """Return what waits for a condition, and then acts."""

    def wait_and_act() -> None:
        wait_for(condition, what=f"what comes before {act.__name__}")
        act()

    return wait_and_act


def note_processes(folder: Path) -> Callable[[], None]:
    """Return what makes each rank of a command leave a file when it opens wandb."""

    def note(sink: Wandb, run: Any) -> None:
        (folder / f"opened_by_rank_{os.environ.get('RANK', '0')}").touch()

    return lambda: before_each(Wandb, "open", note)


def test_wandb_is_one_run_equal_to_metrics_jsonl_after_resumes(tmp_path: Path) -> None:
    line, root = [*RUN, *DDP, *OFFLINE], tmp_path / "runs"
    killed = after_step(9, when(lambda: written(root, "*.wandb"), crash))
    assert command(*line, "launch.max_restarts=0", root=root, before=together(note_processes(tmp_path), killed)).code != 0
    run = finished(*line, root=root)
    assert run.summary["restarts"] == 1
    assert [path.name for path in tmp_path.glob("opened_by_rank_*")] == ["opened_by_rank_0"]
    files = wandb_files(run.directory)
    assert [file.name for file in files] == [f"run-{run.summary['record_id']}.wandb"] * 2  # a file for each start, one id
    assert_equal(wandb_rows(files[-1]), scalars_of(run.rows))  # the last holds what the others may have lost


def test_wandb_has_the_configuration_as_a_tree_the_last_and_best_metrics_and_on_demand_the_checkpoints(tmp_path: Path) -> None:
    more = ["logger.wandb.tags=[a,b]", "run.group=those", "logger.wandb.log_checkpoints=true"]
    auto = ["logger=wandb", "logger.wandb.mode=auto"]
    run = finished(*RUN, *auto, *more, root=tmp_path / "runs", before=partial(use_wandb_key, None, tmp_path))
    assert "WARNING" not in run.output
    (file,) = wandb_files(run.directory)  # offline, without a key
    config = {item.key: json.loads(item.value_json) for item in wandb_run(file).config.update}
    frozen = yaml.safe_load((run.directory / "config.yaml").read_text())
    assert {name: config[name] for name in frozen if name != "hash"} == {k: v for k, v in frozen.items() if k != "hash"}
    assert (wandb_run(file).run_group, list(wandb_run(file).tags)) == ("those", ["a", "b"])
    summary = wandb_summary(file)
    for split, rows in run.summary["metrics"].items():
        for which, row in rows.items():
            for name in row.keys() - {"split"}:
                assert summary[f"{which}/{split}/{name}"] == row[name]
    assert summary["best/val/loss"] == min(row["loss"] for row in run.rows if row["split"] == "val")
    assert_holds_the_kept_checkpoints(file, run)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_keeps_its_record_s_id_and_when_it_began(tmp_path: Path) -> None:
    killed = command(*RUN, root=tmp_path / "runs", before=after_step(2, crash))
    assert not (killed.directory / "checkpoints").exists()
    again, before = finished(*RUN, root=tmp_path / "runs").summary, killed.summary
    assert (again["record_id"], again["began"]) == (before["record_id"], before["began"])


@pytest.mark.slow
def test_another_run_and_one_that_starts_over_have_ids_of_their_own(tmp_path: Path) -> None:
    first = finished(*RUN, root=tmp_path / "first")
    longer = finished(*RUN, "trainer.max_epochs=5", f"run.resume={first.directory}", root=tmp_path / "second")
    directory, known = first.directory, {first.summary["record_id"], longer.summary["record_id"]}
    finished(*RUN, "run.resume=never", root=tmp_path / "first")
    again = json.loads((directory / "summary.json").read_text())
    assert len(known | {again["record_id"]}) == 3


def assert_holds_the_kept_checkpoints(file: Path, run: Ended) -> None:
    requests = [record.request.log_artifact.artifact for record in wandb_records(file)]
    artifacts = [record.artifact for record in wandb_records(file) if record.WhichOneof("record_type") == "artifact"]
    artifacts = artifacts or [artifact for artifact in requests if artifact.name]
    kept = sorted(path for path in (run.directory / "checkpoints").glob("step_*"))
    assert [artifact.type for artifact in artifacts] == ["checkpoint"] * len(kept)
    for artifact, path in zip(artifacts, kept):
        assert artifact.name == f"checkpoint-{run.summary['record_id']}"
        assert path.name in artifact.aliases
        assert ("best" in artifact.aliases) == (path.name == f"step_{run.summary['metrics']['val']['best']['step']:08d}")
        assert {entry.local_path for entry in artifact.manifest.contents} == {str(file) for file in path.iterdir()}
    assert len(kept) == 2


def use_wandb_key(key: str | None, home: Path) -> None:
    os.environ.pop("WANDB_MODE", None)
    os.environ |= {"NETRC": str(home / "none"), "HOME": str(home)} | ({"WANDB_API_KEY": key} if key else {})


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "count"), [("disabled", 0), ("offline", 1)])
def test_a_mode_of_wandb_counts_more_than_an_api_key(mode: str, count: int, tmp_path: Path) -> None:
    with_key = partial(use_wandb_key, "k" * 40, tmp_path)
    run = finished(*RUN, "logger=wandb", f"logger.wandb.mode={mode}", root=tmp_path / "runs", before=with_key)
    found = [path for path in run.directory.glob("wandb/*run-*") if path.name != "latest-run"]
    assert len(found) == count and all(path.match("offline-run-*") for path in found) and "WARNING" not in run.output


# --- Weights & Biases, and a server that is of no use


@contextmanager
def useless_server(kind: str) -> Iterator[str]:
    """Yield the URL of a server that accepts connections and never answers, or of a port where there is none."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        if kind == "refuses":
            server.close()
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refuses", pytest.param("is silent", marks=pytest.mark.slow)])
def test_a_run_neither_waits_for_a_dead_server_nor_loses_its_rows(kind: str, tmp_path: Path) -> None:
    def plant() -> None:
        os.environ.pop("WANDB_MODE", None)
        os.environ |= {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": url}
        before_each(Trainer, "fit", lambda _: begun.append(time.monotonic()))
        after_each(Trainer, "fit", lambda _: (tmp_path / "seconds").write_text(str(time.monotonic() - begun[0])))
        background._MARGIN_S = 60  # for a machine that is busy with other things

    begun = list[float]()
    with useless_server(kind) as url:
        line = [*RUN, "logger=wandb", "logger.wandb.mode=online", "logger.wandb.timeout_s=6"]
        run = finished(*line, root=tmp_path / "runs", before=plant)
    assert float((tmp_path / "seconds").read_text()) < 6  # which is how long wandb tries
    (warning,) = [line for line in run.output.splitlines() if "WARNING" in line]
    (file,) = wandb_files(run.directory)
    assert f"wandb cannot be reached, so this run is recorded offline (`wandb sync {file.parent}` sends it)" in warning
    assert_equal(wandb_rows(file), scalars_of(run.rows))
    assert_same_bits(run, base())


# --- Weights & Biases, online


ONLINE = ["logger=wandb", "logger.wandb.mode=auto"]


def with_key_for(server: WandbServer) -> Callable[[], None]:
    def plant() -> None:
        os.environ.pop("WANDB_MODE", None)
        os.environ |= {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": server.url}
        background._MARGIN_S = 60  # for a machine that is busy with other things

    return plant


@pytest.mark.slow
def test_online_steps_never_go_backwards_and_none_is_lost(tmp_path: Path) -> None:
    line, root = [*RUN, *ONLINE, "logger.wandb.timeout_s=60"], tmp_path / "runs"
    with wandb_server() as server:
        stop = [lambda step=step: (with_key_for(server)(), after_step(step, preempt)()) for step in (6, 11, 13)]
        first = command(*line, root=root, before=stop[0])
        assert first.code == 75 and "WARNING" not in first.output, first.output
        shutil.rmtree(first.directory / "checkpoints" / "step_00000006")  # the server has more than the checkpoint of step 4
        assert command(*line, root=root, before=stop[1]).code == 75
        for number in (9, 10):  # the server has less than the checkpoint of step 11
            del server.history[number]
        assert command(*line, root=root, before=stop[2]).code == 75
        run = finished(*line, root=root, before=with_key_for(server))
    assert set(server.ids) == {run.summary["record_id"]} and run.summary["restarts"] == 3
    assert [row["_step"] for row in server.rows] == list(range(1, 17))
    sent = {(name, row["_step"]): value for row in server.rows for name, value in row.items() if name[0] != "_"}
    expected = scalars_of(run.rows)
    assert sent.keys() == expected.keys()
    for key in sent.keys() - {(f"train/{name}", step) for name in MACHINE for step in (5, 6)}:  # measured twice
        assert sent[key] == expected[key]


# --- a sink that fails


def fail() -> None:
    raise ConnectionError("the planted failure")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {  # a method of a sink, what it does, settings of its process, and what is said
    "raises": ("log", fail, {}, "the planted failure"),
    "dies": ("log", die, {}, "its process died"),
    "takes nothing": ("__init__", signal.pause, {"_MOST_BYTES": -1}, "it reads nothing"),
    "raises when it is opened": ("open", fail, {}, "the planted failure"),
    "raises when it is closed": ("close", fail, {}, "the planted failure"),
    "hangs": ("__init__", signal.pause, {"TIMEOUT_S": 0.2, "_MARGIN_S": 0.2}, "it did not end within 0 s"),
    "hangs when it is closed": ("close", signal.pause, {"TIMEOUT_S": 2.0, "_MARGIN_S": 0.2}, "it did not end within 2 s"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_sink_that_fails_is_a_warning_and_the_run_and_other_sinks_go_on(fault: str, tmp_path: Path) -> None:
    method, act, settings, words = FAULTS[fault]

    def note_and_act(*_: object) -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        act()

    def plant() -> None:
        for name, value in settings.items():
            setattr(background, name, value)
        setattr(TensorBoard, method, note_and_act)

    others = [*OFFLINE, "logger=[tensorboard,wandb]"] if fault.startswith("hangs") else ["logger=tensorboard"]
    run = finished(*RUN, *others, root=tmp_path / "runs", before=plant)
    warning = f"WARNING: logger tensorboard is off for the rest of this run: {words}"
    assert run.output.count(warning) == run.output.count("WARNING") == 1, run.output
    assert run.summary["unlogged"] == ["tensorboard"]
    assert_same_bits(run, base())
    wait_for(lambda: not Path("/proc", (tmp_path / "pid").read_text()).exists(), what="its process's end")
    for file in wandb_files(run.directory):
        assert_equal(wandb_rows(file), scalars_of(run.rows))


@pytest.mark.slow
def test_a_sink_has_no_longer_than_is_left_before_the_signal_that_kills(tmp_path: Path) -> None:
    def plant() -> None:
        TensorBoard.close = lambda self, summary: signal.pause()
        after_step(6, lambda: os.kill(os.getpid(), signal.SIGTERM))()

    stopped = command(*RUN, "logger=tensorboard", "launch.grace_s=2", root=tmp_path / "runs", before=plant)
    assert stopped.code == 75
    assert re.search(r"logger tensorboard is off for the rest of this run: it did not end within [012] s", stopped.output)


def test_no_sink_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    def plant() -> None:
        before_each(TensorBoard, "open", lambda *_: (tmp_path / "pid").write_text(str(os.getpid())))
        after_step(6, when((tmp_path / "pid").exists, crash))()

    assert command(*RUN, "logger=tensorboard", root=tmp_path / "runs", before=plant).code == -signal.SIGKILL
    wait_for(lambda: not Path("/proc", (tmp_path / "pid").read_text()).exists(), what="its end")


@pytest.mark.slow
def test_a_sink_hears_nothing_of_the_signals_that_stop_a_run(tmp_path: Path) -> None:
    """Sent to all processes of the run, as a terminal and schedulers do, they reach the run alone."""

    def stop() -> None:
        os.killpg(0, signal.SIGINT)

    stopped = command(*RUN, *OFFLINE, root=tmp_path / "runs", before=after_step(6, stop))
    assert stopped.code == 75 and "WARNING" not in stopped.output
    assert_equal(wandb_rows(wandb_files(stopped.directory)[0]), scalars_of(stopped.rows))


# --- the console


def test_without_a_terminal_the_console_is_plain_lines() -> None:
    assert "\x1b" not in base().output and "\r" not in base().output
    number = r"[\d.]+"
    pattern = rf"step (\d+)/16  loss {number}  accuracy {number}  top5 {number}  lr {number}e-\d\d  [\d,]+ samples/s  eta \d:\d\d:\d\d"
    steps = [int(found[1]) for line in base().output.splitlines() if (found := re.fullmatch(pattern, line))]
    assert steps[0] == 1 and steps[-1] == 16 and len(steps) <= 2 + base().summary["wall_s"] / 5, "by the clock, and the last"
    row = [row for row in base().rows if row["split"] == "train"][-1]
    assert f"step 16/16  loss {row['loss']:.4f}  accuracy {row['accuracy']:.4f}" in base().output


# --- train.log


def test_train_log_holds_lines_of_every_rank_with_the_rank(tmp_path: Path) -> None:
    run = finished(*RUN, *DDP, root=tmp_path / "runs")
    lines = (run.directory / "train.log").read_text().splitlines()
    pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[rank ([01])\] (?:INFO|DEBUG) (.*)"
    parsed = [re.fullmatch(pattern, line) for line in lines]
    assert all(parsed), lines
    said = {rank: [found[2] for found in parsed if found and found[1] == rank] for rank in "01"}
    for rank in "01":
        assert any(re.match(r"process \d+ on \S+, cpu", text) for text in said[rank]), said
    of_evaluations = [row for row in run.rows if row["split"] != "train"]
    assert sum(re.match(r"step \d+/16  (val|test)  loss ", text) is not None for text in said["0"]) == len(of_evaluations)
    assert sum("step 16/16  loss " in text for text in said["0"]) == 1
    assert not any("  loss " in text for text in said["1"])
