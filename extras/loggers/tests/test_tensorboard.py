"""TensorBoard's event files hold what metrics.jsonl holds, once, also after interruptions."""

import io
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extras.loggers.tensorboard import TensorBoard
from extras.loggers.tests.records import (
    assert_equal,
    scalars_of,
    tensorboard_events,
    tensorboard_scalars,
    wandb_files,
    wandb_records,
    when,
    written,
)
from framework.data.synthetic import Synthetic
from tests.harness import Ended, command, finished, refused
from tests.test_loggers import DDP, RUN
from tests.test_resume import after_step, crash, preempted


@pytest.mark.slow
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
