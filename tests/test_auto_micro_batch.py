"""`micro_batch_size=auto`: half of a process's share, a quarter, ... until a forward and backward fit into memory."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.launch.elastic.agent import _Agent
from framework.launch.failures import Failure
from framework.runs.directory import RunDirectory
from tests.harness import assert_close, command, finished, once

LINE = ["model._target_=tests.test_auto_micro_batch.Hungry", "precision=fp64",
        "global_batch_size=64", "trainer.max_epochs=null", "trainer.max_steps=6", "trainer.log_every=1", "trainer.eval_every=3",
        "checkpoint.every=2"]  # fmt: skip
TWO = ["parallel=ddp", "launch.nproc_per_node=2", "launch.max_restarts=0"]
_MOST = 20  # samples for which there is memory
_ENDLESS = 2**60  # bytes


class Hungry(nn.Module):
    """A model whose forward of more than 20 samples asks torch for more memory than there is."""

    def __init__(self, in_channels: int, num_classes: int, most: int = _MOST) -> None:
        super().__init__()
        self.most = most
        self.layer = nn.Linear(64 * in_channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        if len(images) > self.most:
            torch.empty(_ENDLESS, dtype=torch.uint8)
        return self.layer(images.flatten(1))


class TooLarge(Hungry):
    """A model that does not fit itself."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes)
        if self.layer.weight.device.type != "meta":
            torch.empty(_ENDLESS, dtype=torch.uint8)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "strategy", [[], TWO, [*TWO, "parallel=fsdp"], [*TWO, "launch.nnodes=1:2"]], ids=["single", "ddp", "fsdp", "elastic"]
)
def test_the_largest_half_that_fits_is_found_and_kept(strategy: list[str], tmp_path: Path) -> None:
    run = finished(*LINE, *strategy, "micro_batch_size=auto", root=tmp_path / "runs")
    sizes = re.findall(r"lacks memory: the run starts again with micro-batches of (\d+)", run.output)
    assert sizes == (["16"] if strategy else ["32", "16"])
    assert_close(run, once(*LINE, "micro_batch_size=16"))
    assert [*json.loads((run.directory / "micro_batch_size.json").read_text()).values()] == [16]
    assert "64 a step in micro-batches of 16" in run.output
    measured = command("mode=eval", f"run.dir={run.directory}", "launch.nproc_per_node=1", root=tmp_path / "runs")
    assert measured.code == 0, measured.output
    assert ("lacks memory" in measured.output) == bool(strategy)  # one process is another place; it finds its own size


@pytest.mark.parametrize("smaller", [None, 16])
def test_between_nodes_only_a_lack_of_memory_is_not_counted_as_a_failure(smaller: int | None, tmp_path: Path) -> None:
    seen: list[str] = []
    meeting = SimpleNamespace(number=0, first=lambda key, value: value, recorded=lambda key: None, end=seen.append,
                              count=lambda name: seen.append(name) or 1)  # fmt: skip
    node: Any = SimpleNamespace(_meeting=meeting, _directory=RunDirectory(tmp_path), failures=[],
                                launch=SimpleNamespace(max_restarts=3))  # fmt: skip
    _Agent._note(node, Failure(1, "lacks memory", "here", smaller=smaller), 0)
    assert seen == (["failures"] if smaller is None else [])


@pytest.mark.slow
def test_a_prediction_uses_the_size_of_the_run_and_a_rehearsal_needs_few_samples(tmp_path: Path) -> None:
    run = finished(*LINE, "+model.most=5", "micro_batch_size=auto", "rehearse=true", root=tmp_path / "runs")
    assert "lacks memory" in run.output and "rehears" not in run.output
    noted = (run.directory / "micro_batch_size.json").read_text()
    predicted = command("mode=predict", f"run.dir={run.directory}", root=tmp_path / "runs")
    assert predicted.code == 0 and "lacks memory" not in predicted.output, predicted.output
    assert (run.directory / "micro_batch_size.json").read_text() == noted


@pytest.mark.slow
def test_it_is_the_run_of_null(tmp_path: Path) -> None:
    stopped = command(*LINE, root=tmp_path / "runs")
    assert stopped.code == 1
    assert "less memory is needed with a smaller micro_batch_size" in stopped.output
    continued = finished(*LINE, "micro_batch_size=auto", root=tmp_path / "runs")
    assert continued.directory == stopped.directory


def test_a_model_that_does_not_fit_itself_is_not_tried_again(tmp_path: Path) -> None:
    line = [*LINE, "model._target_=tests.test_auto_micro_batch.TooLarge", "micro_batch_size=auto", "rehearse=false"]
    failed = command(*line, root=tmp_path / "runs")
    assert failed.code == 1
    assert "starts again" not in failed.output


@pytest.mark.slow
@pytest.mark.parametrize(("model", "what"), [("dropout=0.5", "draws random numbers"), ("norm=batch", "couples the samples")])
def test_layers_that_depend_on_the_cut_are_told(model: str, what: str, tmp_path: Path) -> None:
    line = ["model=cnn", f"model.{model}", "trainer.max_epochs=null", "trainer.max_steps=2", "micro_batch_size=auto"]
    told = finished(*line, "rehearse=true", root=tmp_path / "runs").output
    assert re.search(f"{what}.*, so the results depend on the number of processes and their memory", told), told
