"""part=predictions: a small table of what the model says, alike under every strategy, for files and wandb."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from extras.loggers.tests.records import OFFLINE, wandb_files, wandb_records
from framework.build import components
from framework.config.frozen_file import recall
from framework.tasks.classification import Classification
from tests.harness import Ended, Says, finished, once, refused
from tests.test_conformance import layouts

RUN = ["dataset=digits", "model=mlp", "model.dim=12", "model.num_layers=4", "global_batch_size=14", "micro_batch_size=4", "trainer.max_epochs=null",
       "trainer.max_steps=6", "trainer.eval_every=3", "precision=fp64", "part=predictions", "part.predictions.count=17"]  # fmt: skip


def table(run: Ended, name: str = "first_val") -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    path = run.directory / "predictions" / name
    return [json.loads(line) for line in Path(f"{path}.jsonl").read_text().splitlines()], load_file(f"{path}.safetensors")


def test_it_is_what_mode_predict_writes_of_the_first_samples_and_their_targets(tmp_path: Path) -> None:
    records, tensors = table(once(*RUN))
    finished("mode=predict", f"run.dir={once(*RUN).directory}", "predict.split=val", root=tmp_path)
    whole, all_tensors = table(once(*RUN), "val")
    assert len(records) == 17 < len(whole)
    targets = components.dataset(recall(once(*RUN).directory)["dataset"]).load("val").gather(torch.arange(17).numpy())[1]
    for number, (one, other) in enumerate(zip(records, whole)):
        assert (one["sample"], one["class"], one["target"]) == (number, other["class"], int(targets[number]))
        assert one["probability"] == pytest.approx(other["probability"], rel=1e-12)
    assert torch.allclose(tensors["output"], all_tensors["output"][:17], rtol=0, atol=1e-12)
    with Image.open(once(*RUN).directory / "predictions" / "first_val.png") as picture:
        assert picture.width == 17 * picture.height


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "mesh"), [(name, *layouts(name)[0]) for name in ("ddp", "pipeline", "fsdp", "tensor", "pp+fsdp+tp")]
)
def test_every_strategy_writes_the_same(strategy: str, ranks: int, mesh: list[str], tmp_path: Path) -> None:
    run = finished(*RUN, f"parallel={strategy}", f"launch.nproc_per_node={ranks}", *mesh, root=tmp_path / "runs")
    (records, tensors), (wanted, theirs) = table(run), table(once(*RUN))
    assert [(row["class"], row["target"]) for row in records] == [(row["class"], row["target"]) for row in wanted]
    assert torch.allclose(tensors["output"], theirs["output"], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_wandb_gets_a_table_with_pictures(tmp_path: Path) -> None:
    run = finished(*RUN, *OFFLINE, "part.predictions.count=5", root=tmp_path / "runs")
    records, _ = table(run)
    (file,) = wandb_files(run.directory)
    (sent,) = (record.artifact for record in wandb_records(file) if record.WhichOneof("record_type") == "artifact")
    copies = {item.path: Path(item.local_path) for item in sent.manifest.contents}  # wandb's, in the home directory
    content = json.loads(copies["predictions/first_val.table.json"].read_text())
    pictures = [Image.open(copies[row[-1]["path"]]) for row in content["data"]]
    for copy in copies.values():
        copy.unlink(missing_ok=True)
    assert content["columns"] == ["sample", "class", "probability", "target", "image"]
    assert [row[:-1] for row in content["data"]] == [list(record.values()) for record in records]
    with Image.open(run.directory / "predictions" / "first_val.png") as strip:
        assert [picture.tobytes() for picture in pictures] == [
            strip.crop((64 * n, 0, 64 * (n + 1), 64)).tobytes() for n in range(5)
        ]


TEXTS = ["dataset=text", "dataset.seq_len=16", "dataset.max_bytes=4000", "model=gpt", "model.dim=16", "model.num_layers=1",
         "model.num_heads=2", "trainer.max_steps=2", "trainer.eval_every=1", "part=predictions"]  # fmt: skip


class Varying(Classification):
    """Writes tensors that are not alike for all samples, and one whose type safetensors does not have."""

    def __init__(self) -> None:
        super().__init__(label_smoothing=0.0)

    def written(self, outputs: Tensor) -> dict[str, Tensor]:
        grows = 1100 if self.num_calls % 2 else 3
        self.num_calls += 1
        return {"class": outputs.argmax(dim=-1), "grows": outputs.new_zeros(len(outputs), grows),
                "padded": outputs.new_zeros(len(outputs), len(outputs)), "odd": outputs.to(torch.complex64)}  # fmt: skip

    num_calls = 0


@pytest.mark.slow
def test_what_does_not_fit_into_one_table_is_left_out_with_a_warning(tmp_path: Path) -> None:
    own = ["task._target_=tests.test_first_predictions.Varying", "part.predictions.count=15", "rehearse=false"]
    run = finished(*RUN, *own, root=tmp_path / "runs")
    records, tensors = table(run)
    assert tensors.keys() == {"class", "target"} and len(records) == 15
    assert run.output.count("part.predictions: left out: grows, odd, padded (") == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([*TEXTS, "parallel=context", "launch.nproc_per_node=2"], "part.predictions: needs the outputs of whole samples ... context ..."),
        ([*RUN, "task._target_=tests.test_torchmetrics.Steps", "task.label_smoothing=0.0"], "part.predictions: ... measures in its step() ..."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_the_start(line: list[str], said: str) -> None:
    assert Says(said) in [line.strip() for line in refused(*line).splitlines()]


def test_a_part_of_ones_own_sees_the_outputs_of_each_evaluation(tmp_path: Path) -> None:
    line = [word for word in RUN if not word.startswith("part")]
    own = finished(*line, "+part.own._target_=tests.own_parts.CountsRight", root=tmp_path / "runs", before=None)
    accuracy = [row["accuracy"] for row in own.rows if row["split"] == "val"]
    found = json.loads((own.directory / "right.json").read_text())
    assert found == [pytest.approx(value, rel=1e-12) for value in accuracy] and len(found) == 2
