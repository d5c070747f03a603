"""model.init_from: a run that begins with the weights of a file, where they fit; the file's content is part of what the run is."""

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from framework.cli import run
from tests.checkpoint.test_hostile import Payload
from tests.harness import Ended, assert_same_bits, before_each, command, finished, once, refused
from tests.test_conformance import layouts
from tests.test_resume import preempted

RUN = ["dataset=synthetic", "dataset.kind=tokens", "task=language_modeling", "dataset.num_train=24", "dataset.num_val=6",
       "dataset.num_test=6", "dataset.seq_len=12", "dataset.vocab_size=16", "model=gpt", "model.dim=16",
       "model.num_layers=2", "model.num_heads=2", "model.tie_embeddings=true", "precision=fp64", "global_batch_size=8",
       "micro_batch_size=4", "trainer.max_epochs=2", "trainer.log_every=1", "checkpoint.every=2",
       "scheduler.warmup_steps=1"]  # fmt: skip
STILL = ["trainer.max_steps=1", "optimizer.lr=1e-15", "optimizer.weight_decay=0", "seed=7"]  # other weights, which stay


def first() -> Ended:
    return once(*RUN, "optimizer.lr=0.02")


def init(path: Path) -> str:
    return f"model.init_from={path}"


def assert_begun_with(run: Ended, weights: dict[str, torch.Tensor]) -> None:
    for name, value in weights.items():
        assert (run.weights[name] - value).abs().max() <= 1e-12, name


STRATEGIES = [("fsdp", 3), ("pipeline", 2), ("tensor", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
def test_under_any_strategy_a_run_begins_with_the_files_weights(strategy: str, ranks: int, tmp_path: Path) -> None:
    mesh = next(mesh for count, mesh in layouts(strategy) if count == ranks)
    line = [f"parallel={strategy}", f"launch.nproc_per_node={ranks}", *mesh, init(first().directory / "model.safetensors")]
    run = finished(*RUN, *STILL, *line, root=tmp_path / "runs")
    assert_begun_with(run, first().weights)
    assert "model.init_from: 24 of the model's 24 tensors are loaded from " in run.output
    assert "WARNING" not in run.output
    cold = finished(*RUN, *STILL, root=tmp_path / "cold")
    assert (cold.weights["head.weight"] - first().weights["head.weight"]).abs().max() > 1e-3


@pytest.mark.slow
def test_a_warm_run_is_continued_as_any(tmp_path: Path) -> None:
    line = [*RUN, init(first().directory / "model.safetensors"), "trainer.max_epochs=3"]
    whole = finished(*line, root=tmp_path / "whole")
    preempted(*line, at=3, root=tmp_path / "runs")
    again = finished(*line, root=tmp_path / "runs")
    assert "continuing from" in again.output and "model.init_from" not in again.output
    assert_same_bits(again, whole)


def test_what_does_not_fit_is_named_and_left_as_it_was(tmp_path: Path) -> None:
    weights = {name: value for name, value in first().weights.items() if name not in ("head.weight", "norm.bias")}
    weights["norm.weight"] = torch.zeros(3, 5)
    weights["layers.0.mlp_norm.bias"] = torch.zeros(16, dtype=torch.int64)
    weights["another"] = torch.zeros(2)
    save_file(weights, tmp_path / "file.safetensors")
    run = finished(*RUN, *STILL, init(tmp_path / "file.safetensors"), root=tmp_path / "runs")
    # head.weight is embedding.weight, which is there
    assert "WARNING: model.init_from: missing in the file: norm.bias\n" in run.output
    assert "WARNING: model.init_from: unexpected in the file: another\n" in run.output
    differing = ["layers.0.mlp_norm.bias (I64 [16] in the file, float64 [16] in the model)",
                 "norm.weight (F32 [3, 5] in the file, float64 [16] in the model)"]  # fmt: skip
    assert f"WARNING: model.init_from: of another shape or kind: {', '.join(differing)}\n" in run.output
    assert torch.equal(run.weights["norm.weight"].round(), torch.ones(16))
    assert_begun_with(
        run, {"embedding.weight": first().weights["embedding.weight"], "head.weight": first().weights["head.weight"]}
    )


def test_an_evaluation_does_not_ask_for_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    save_file(first().weights, file)
    run = finished(*RUN, *STILL, init(file), root=tmp_path / "runs")
    file.unlink()
    ended = finished("mode=eval", f"run.dir={run.directory}", root=tmp_path / "none")
    assert "test" in ended.output and "loss" in ended.output


# --- what is refused


def a_strangers(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    save_file({"norm.weight": torch.zeros(16)}, path)
    os.chown(path, 54321, -1)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(pickle.dumps(Payload(path))), "is not a safetensors file: "),
        (lambda path: path.write_bytes(struct.pack("<Q", 2**63) + b"{}"), "is not a safetensors file: "),
        (lambda path: save_file({"\x1b[2J": torch.zeros(1)}, path), "has a name that cannot be printed: '\\x1b[2J'"),
        (os.mkfifo, "is a device or a pipe instead of a file"),
        (a_strangers, "belongs to another user (uid 54321)"),
        (lambda path: save_file({"fc.weight": torch.zeros(3), "norm.weight": torch.zeros(99)}, path), "fits this model ("),
    ],
)
def test_what_is_no_file_of_weights_is_refused(make: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    make(path)
    found = refused(*RUN, init(path))
    assert found.startswith("model.init_from: ") and said in found


def test_two_places_to_begin_from_are_refused() -> None:
    line = [init(first().directory / "model.safetensors"), f"run.resume={first().directory}", "name=other"]
    assert "model.init_from: cannot be given together with run.resume: each chooses the first weights" in refused(*RUN, *line)


def change_before_the_start(path: Path) -> Callable[[], None]:
    return lambda: before_each(run, "claim", lambda *_, **__: path.write_bytes(path.read_bytes() + b" "))


def test_a_file_that_changes_before_the_start_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    save_file(first().weights, file)
    line = [*RUN, init(file), "parallel=ddp", "launch.nproc_per_node=2"]
    refused = command(*line, root=tmp_path / "runs", before=change_before_the_start(file))
    assert refused.code == 65, refused.output
    assert f"model.init_from: {file} has changed since the command started" in refused.output
