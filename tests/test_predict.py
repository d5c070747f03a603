"""mode=predict: by `run.dir` alone, what the model says of each sample of a split or of a folder, whoever computes it."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from framework import load
from framework.build import components
from framework.config.folders import options
from framework.config.frozen_file import recall
from framework.data.source import decode_image
from framework.modes import predict
from framework.tasks.classification import Classification
from tests.harness import Ended, Says, command, finished, once, refused, signal_before, split_of
from tests.test_conformance import CONTEXTS, FOR_EXPERTS, layouts
from tests.test_evaluate import RUN as TOKENS

IMAGES = ["dataset=synthetic", "dataset.num_train=32", "dataset.num_val=7", "dataset.num_test=15", "dataset.image_size=8", "model=cnn",
          "model.channels=[4,8]", "model.norm=batch", "global_batch_size=8", "trainer.max_epochs=1", "checkpoint.every=2", "precision=fp64",
          "checkpoint.keep_last=9", "optimizer.lr=0.05", "scheduler.warmup_steps=1"]  # fmt: skip


class Oddly(Classification):
    """Writes something of its own, which the samples of a batch share, or whose shape depends on them."""

    def __init__(self, *, kind: str) -> None:
        super().__init__(label_smoothing=0.0)
        self.kind = kind

    def written(self, outputs: Tensor) -> dict[str, Tensor]:
        if self.kind == "own":
            return {"highest": outputs.amax(dim=-1), "is_odd": outputs.argmax(dim=-1) % 2 == 1, "pair": outputs[:, :2].half()}
        if self.kind == "shared":
            return {"mean": outputs.mean(dim=0)}
        if self.kind == "complex":
            return {"output": outputs.to(torch.complex64)}
        return {"output": outputs[:, : 1 + len(outputs)]}


def run(kind: str) -> Ended:
    lines = {"tokens": TOKENS, "images": IMAGES}
    return once(*lines.get(kind, [*IMAGES, "task._target_=tests.test_predict.Oddly", f"task.kind={kind}"]))


def predicted(run: Path, *overrides: str, root: Path, name: str = "test") -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    finished("mode=predict", f"run.dir={run}", *overrides, root=root)
    folder = run / "predictions"
    records = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert [record["sample"] for record in records] == list(range(len(records)))
    return records, load_file(folder / f"{name}.safetensors")


def expected(run: Ended, split: str, *, checkpoint: int | str = "final") -> Tensor:
    """Return the model's outputs on the split, as plain PyTorch computes them."""
    inputs, _ = split_of(run, split)
    model = load(run.directory, checkpoint=checkpoint).double()
    with torch.no_grad():
        return model(inputs.double() if inputs.is_floating_point() else inputs)


def assert_equal(actual: Tensor, wanted: Tensor) -> None:
    assert actual.shape == wanted.shape and (actual - wanted).abs().max() <= 1e-10 * max(1.0, float(wanted.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "mesh"),
    [("ddp", 3, []), *((strategy, *layouts(strategy)[0]) for strategy in options("parallel") if strategy not in FOR_EXPERTS)],
)
def test_every_strategy_writes_the_same(strategy: str, ranks: int, mesh: list[str], tmp_path: Path) -> None:
    trained = run("tokens")
    shutil.copytree(trained.directory, tmp_path / "copy", ignore=shutil.ignore_patterns("predictions", ".predict"))
    line = [f"parallel={strategy}", f"launch.nproc_per_node={ranks}", *mesh]
    if strategy in CONTEXTS:
        assert "mode: needs the outputs of whole samples" in refused("mode=predict", f"run.dir={tmp_path / 'copy'}", *line)
        return
    records, tensors = predicted(tmp_path / "copy", *line, root=tmp_path / "none")
    assert records == [{"sample": number} for number in range(13)]
    assert_equal(tensors["output"], expected(trained, "test"))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("split", "more"), [("val", ["parallel=ddp", "launch.nproc_per_node=2"]), ("train", ["micro_batch_size=3"])]
)
def test_a_class_and_its_probability_are_in_the_lines(split: str, more: list[str], tmp_path: Path) -> None:
    trained = run("images")
    records, tensors = predicted(trained.directory, f"predict.split={split}", *more, root=tmp_path / "none", name=split)
    picture = Image.open(trained.directory / "predictions" / f"{split}.png")
    assert picture.size == (64 * min(8, len(records)), 64) and len(picture.getcolors(1 << 20) or []) > 10
    outputs = expected(trained, split)
    assert_equal(tensors["output"], outputs)
    probability, label = outputs.softmax(dim=-1).max(dim=-1)
    assert [record["class"] for record in records] == label.tolist() == tensors["class"].tolist()
    assert_equal(torch.tensor([record["probability"] for record in records], dtype=torch.float64), probability)
    with safe_open(trained.directory / "predictions" / f"{split}.safetensors", framework="pt") as file:
        config = recall(trained.directory)
        assert file.metadata()["run_id"] == config["run"]["id"] and file.metadata()["step"] == "4"


def test_the_weights_are_those_of_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    trained = run("images")
    _, tensors = predicted(trained.directory, "run.checkpoint=2", root=tmp_path / "none")
    assert_equal(tensors["output"], expected(trained, "test", checkpoint=2))
    assert (tensors["output"] - expected(trained, "test")).abs().max() > 1e-3


@pytest.mark.slow
def test_a_task_can_say_what_is_written(tmp_path: Path) -> None:
    trained = run("own")
    line = ["parallel=ddp", "launch.nproc_per_node=2"]
    records, tensors = predicted(trained.directory, *line, root=tmp_path / "none")
    outputs = expected(trained, "test")
    assert records[3].keys() == {"sample", "highest", "is_odd"} and isinstance(records[3]["is_odd"], bool)
    assert tensors.keys() == {"highest", "is_odd", "pair"} and torch.equal(tensors["pair"], outputs[:, :2].half())
    assert tensors["is_odd"].tolist() == [record["is_odd"] for record in records] == (outputs.argmax(-1) % 2 == 1).tolist()


# --- a folder of files


def picture(path: Path, seed: int, size: tuple[int, int] = (12, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)


@pytest.mark.slow
def test_files_are_predicted_by_their_names_where_no_training_data_are(tmp_path: Path) -> None:
    for number in range(24):
        picture(tmp_path / "data" / "train" / f"class_{number % 2}" / f"{number:02}.png", number)
    line = [
        "dataset=image_folder", f"dataset.root={tmp_path / 'data'}", "dataset.image_size=8", "model=mlp",
        "trainer.max_steps=1", "precision=fp64",
    ]  # fmt: skip
    trained = finished(*line, root=tmp_path / "runs")
    shutil.rmtree(tmp_path / "data")
    names = ["a.png", "b/c.JPG", "b/d.png", "e.png"]
    for number, name in enumerate(names[::-1]):
        picture(tmp_path / "mine" / name, number)
    (tmp_path / "mine" / "notes.txt").write_text("not an image")
    more = [f"predict.files={tmp_path / 'mine'}", "parallel=ddp", "launch.nproc_per_node=2", "dataset.num_workers=1"]
    records, tensors = predicted(trained.directory, *more, root=tmp_path / "none", name="files")
    assert [record["file"] for record in records] == names
    dataset = components.dataset(recall(trained.directory)["dataset"])
    images = np.stack([decode_image(tmp_path / "mine" / name, image_size=8, in_channels=3) for name in names])
    inputs, _ = dataset.transform(torch.from_numpy(images), torch.zeros(4), keys=None)
    with torch.no_grad():
        assert_equal(tensors["output"], load(trained.directory).double()(inputs.double()))


# --- what is refused, and what ends it


@pytest.mark.parametrize(
    ("kind", "line", "said"),
    [
        ("images", "predict.split=tst", "predict.split: 'tst' is not valid did you mean test?"),
        ("images", "predict.files=FOLDER predict.split=val", "predict.split: cannot be given together with predict.files"),
        ("images", "predict.files=FOLDER", "predict.files: holds no image"),
        ("tokens", "predict.files=FOLDER", "predict.files: its samples are not images"),
    ],
)
def test_what_is_wrong_is_a_line_before_the_start(kind: str, line: str, said: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run(kind).directory, copy, ignore=shutil.ignore_patterns("predictions", ".predict"))
    (tmp_path / "f").mkdir()
    words = line.replace("FOLDER", str(tmp_path / "f")).split()
    assert refused("mode=predict", f"run.dir={copy}", *words) == Says(said)
    assert not (copy / "predictions").exists() and not (copy / ".predict").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "said"),
    [
        ("shared", 2, "task: mean of shape [10] does not begin with the 4 samples; its written(outputs)"),
        ("ragged", 1, "task: some samples have output [9], and others output [8]"),
        ("complex", 1, "task: output [10]: a type that safetensors does not have"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(kind: str, ranks: int, said: str, tmp_path: Path) -> None:
    directory = run(kind).directory
    line = [f"run.dir={directory}", "parallel=ddp", f"launch.nproc_per_node={ranks}"]
    refused = command("mode=predict", *line, root=tmp_path / "none")
    assert refused.code == 78 and said in refused.output, refused.output
    assert not list((directory / "predictions").iterdir())


@pytest.mark.slow
def test_a_signal_stops_it_and_leaves_what_was_there(tmp_path: Path) -> None:
    directory = run("images").directory
    predicted(directory, "predict.split=train", root=tmp_path / "none", name="train")
    before = {path.name: path.read_bytes() for path in (directory / "predictions").iterdir()}
    line = [f"run.dir={directory}", "predict.split=train", "run.checkpoint=2", "parallel=ddp", "launch.nproc_per_node=2"]
    before_add = partial(signal_before, predict.PredictionsFile, "add")
    stopped = command("mode=predict", *line, root=tmp_path / "none", before=before_add)
    assert stopped.code == 75, stopped.output
    assert {path.name: path.read_bytes() for path in (directory / "predictions").iterdir()} == before
