"""mode=check: the model's layers and a rehearsal of the run; nothing is written."""

import io
from pathlib import Path

import pytest
import torch
from torch import nn

from framework.build.components import shapes_of
from framework.build.example import example_inputs
from framework.cli.check_run import print_summary
from framework.data.map_style import MapStyle
from framework.modules.summary import summary
from framework.preflight import rehearsal
from tests.faulty_data import Points
from tests.harness import Says, checked, command

LINE = ["dataset=synthetic", "dataset.image_size=8", "dataset.num_train=40", "dataset.num_val=8", "dataset.num_test=8", "model=vit",
        "model.patch_size=4", "model.dim=16", "model.num_layers=3", "model.num_heads=2", "trainer.max_steps=2", "trainer.max_epochs=null"]  # fmt: skip


def test_it_prints_the_layers_and_what_was_tried_and_writes_nothing(tmp_path: Path) -> None:
    ended = command(*LINE, "mode=check", "rehearse=false", root=tmp_path / "runs")
    assert ended.code == 0, ended.output
    table = [line.split() for line in ended.output.splitlines()]
    (blocks,) = [words for words in table if words and words[0] == "layers.0-2"]
    assert blocks[1] == "Block" and blocks[blocks.index("3") : blocks.index("3") + 2] == ["3", "x"]
    assert "the rehearsal finds no problem" in ended.output
    assert not list((tmp_path / "runs").glob("*"))
    config = checked(*LINE)
    parameters = sum(weight.numel() for weight in shapes_of(config.model, seed=0).parameters())
    assert config.run.id in ended.output and f"{parameters:,}" in ended.output


def test_a_rehearsal_that_was_not_finished_is_said(tmp_path: Path) -> None:
    def out_of_time() -> None:
        rehearsal._LIMIT_S = 0.0

    refused = command(*LINE, "mode=check", root=tmp_path / "runs", before=out_of_time)
    said = "rehearse: the rehearsal was not finished: it took more than 0 s ... it is not checked whether a continued run computes the same (a run would start without it)"
    assert refused.code == 78 and refused.output.splitlines()[-1] == Says(said), refused.output


def test_where_the_data_tell_no_shapes_a_batch_does(tmp_path: Path) -> None:
    line = ["model._target_=tests.two_inputs.TwoInputs", "dataset._target_=tests.two_inputs.Pairs", "task=classification"]
    ended = command(*line, "mode=check", root=tmp_path / "runs")
    assert ended.code == 0, ended.output
    table = [line.split() for line in ended.output.splitlines()]
    assert ["left", "Linear", "N", "x", "12", "48", "72"] in table, ended.output


def test_a_forward_is_followed_with_the_first_samples_where_facts_do_not_give_their_shape() -> None:
    data = MapStyle(train=lambda: Points())
    inputs = example_inputs(data, lambda: data.load("train"), dtype=torch.float64)
    assert isinstance(inputs, torch.Tensor) and (inputs.shape, inputs.dtype) == ((2, 12), torch.float64) and inputs.is_meta
    assert example_inputs(data, lambda: data.load("val").gone, dtype=torch.float64) is None  # as where the data are gone


def test_numbers_are_those_of_the_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, 3).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    whole, layers, linear, head = summary(Net(), example=torch.empty(2, 8, device="meta"))
    assert (whole["parameters"], whole["trained"], whole["flops"]) == (4 * 72 + 27, 4 * 72, 2 * (4 * 64 + 24))
    assert layers["parameters"] == 4 * 72 and layers["shape"] == ""  # a list is not called
    assert (linear["name"], linear["count"], linear["parameters"], linear["shape"], linear["flops"]) == (
        "layers.0-3",
        4,
        72,
        "N x 8",
        128,
    )
    assert (head["trained"], head["shape"]) == (0, "N x 3")


def test_a_model_that_reads_numbers_has_parameters_only() -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum())

    (row,) = summary(Net(8, 2), example=torch.empty(2, 8, device="meta"))
    assert row["parameters"] == 18 and row["shape"] == "" and row["flops"] is None


@pytest.mark.parametrize("columns", [120, 80, 60, 40])
def test_the_table_of_a_model_folds_names_and_no_numbers_on_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    file = io.StringIO()
    file.isatty = lambda: True
    whole = {"name": "", "kind": "ViTForImageClassification", "count": 1, "shape": "(2, 10)"}
    layer = {"name": "vit.encoder.layer.0", "kind": "ViTLayer", "count": 2, "shape": "(2, 17, 32)"}
    sizes = {"parameters": 184_000, "trained": 184_000, "flops": 184e3}
    print_summary([whole | sizes, layer | sizes], file=file)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert any("2 x 184,000" in line and line.rstrip().endswith("2 x 184k") for line in lines), lines
