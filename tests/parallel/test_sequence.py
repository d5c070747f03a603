"""Sequence parallelism: between the layers that tensor parallelism cuts, the tokens are cut."""

from pathlib import Path

import pytest

from tests.harness import Ended, Says, assert_close, command, finished
from tests.test_conformance import MODELS, OPTIMIZERS, RUN
from tests.test_resume import after_step, preempt

LINE = [*RUN, *MODELS["gpt, tied"], "dataset.seq_len=12"]
MESHES = {"tensor 2": ["parallel=tensor", "launch.nproc_per_node=2"], "tensor 4": ["parallel=tensor", "launch.nproc_per_node=4"],
          "fsdp+tp 2x2": ["parallel=fsdp+tp", "launch.nproc_per_node=4"]}  # fmt: skip


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    ends = {name: finished(*LINE, *line, root=tmp_path_factory.mktemp(name) / "runs") for name, line in OPTIMIZERS.items()}
    return ends | {"one block": finished(*LINE, "model.num_layers=1", root=tmp_path_factory.mktemp("block") / "runs")}


@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [
        ("tensor 2", "adamw"),
        pytest.param("fsdp+tp 2x2", "adamw", marks=pytest.mark.slow),
        pytest.param("fsdp+tp 2x2", "sgd", marks=pytest.mark.slow),
    ],
)
def test_it_computes_what_one_process_does(mesh: str, optimizer: str, one: dict[str, Ended], tmp_path: Path) -> None:
    line = [*LINE, *OPTIMIZERS[optimizer], *MESHES[mesh], "parallel.sequence=true"]
    assert_close(finished(*line, root=tmp_path / "runs"), one[optimizer])


def test_one_block_is_the_first_and_the_last(one: dict[str, Ended], tmp_path: Path) -> None:
    line = [*LINE, "model.num_layers=1", *MESHES["tensor 2"], "parallel.sequence=true"]
    assert_close(finished(*line, root=tmp_path / "runs"), one["one block"])


@pytest.mark.slow
def test_a_run_goes_on_with_it_and_without(one: dict[str, Ended], tmp_path: Path) -> None:
    cut = [*MESHES["fsdp+tp 2x2"], "parallel.sequence=true"]
    before = after_step(5, preempt)  # which two ranks agree on a step later
    stopped = command(*LINE, *OPTIMIZERS["adamw"], *cut, root=tmp_path / "cut", before=before)
    assert (stopped.code, stopped.summary["step"]) == (75, 6)
    resume = f"run.resume={stopped.directory}"
    assert_close(finished(*LINE, *OPTIMIZERS["adamw"], resume, root=tmp_path / "whole"), one["adamw"])
    ended = finished(*LINE, *OPTIMIZERS["adamw"], *MESHES["tensor 2"], "parallel.sequence=true", resume, root=tmp_path / "two")
    assert_close(ended, one["adamw"])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (["dataset.seq_len=13"], "parallel.sequence: true tensor=2 ... 13 ... sequence=false"),
        (["dataset=synthetic", "dataset.kind=images", "task=classification", "model=mlp"], "parallel.sequence: true MLP ... blocks() ... tensor_plan()"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused(line: list[str], problem: str, tmp_path: Path) -> None:
    begin = RUN if "model=mlp" in line else LINE
    refused = command(*begin, *line, *MESHES["tensor 2"], "parallel.sequence=true", root=tmp_path / "runs")
    assert refused.code == 78
    assert refused.output == Says(problem)
