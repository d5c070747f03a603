"""mode=eval: by `run.dir` alone, any split of any checkpoint, under any strategy and world size, to the same numbers."""

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from framework import load
from framework.config.folders import options
from framework.config.frozen_file import freeze, recall
from framework.modes import evaluate
from framework.modes import load_run as restored
from framework.runtime.lock import Lock
from tests.checkpoint.test_damage import flip_a_bit
from tests.harness import Ended, before_each, begin, command, end, finished, once, signal_before, typed, wait_for_checkpoint
from tests.test_conformance import FOR_EXPERTS, layouts

# tied weights, an average of the weights that is what is evaluated, splits that no world size divides
RUN = ["dataset=synthetic", "dataset.kind=tokens", "task=language_modeling", "dataset.num_train=40", "dataset.num_val=11",
       "dataset.num_test=13", "dataset.seq_len=12", "dataset.vocab_size=16", "model=gpt", "model.dim=16",
       "model.num_layers=4", "model.num_heads=4", "model.tie_embeddings=true", "model.dropout=0.1", "precision=fp64",
       "global_batch_size=8", "micro_batch_size=2", "trainer.max_epochs=2", "trainer.eval_every=2", "checkpoint.every=2",
       "checkpoint.keep_last=9", "checkpoint.keep_best=1", "trainer.ema_decay=0.8", "optimizer.lr=0.02",
       "scheduler.warmup_steps=1"]  # fmt: skip


def run() -> Ended:
    return once(*RUN)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Another run, as it was trained: a run need not be where it was trained."""
    kept = shutil.ignore_patterns("evaluations.jsonl", ".eval")
    return Path(shutil.copytree(run().directory, tmp_path / "copy", ignore=kept))


def evaluated(run: Path, *overrides: str, root: Path, **options: Any) -> dict[str, Any]:
    finished("mode=eval", f"run.dir={run}", *overrides, root=root, **options)
    return json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])


def assert_equal(row: dict[str, Any], expected: dict[str, Any]) -> None:
    """To 1e-10, the numbers that training has measured at the same step of the same split."""
    for name in ("loss", "accuracy", "bits_per_token"):
        assert abs(row[name] - expected[name]) <= 1e-10 * max(1.0, abs(expected[name])), (name, row, expected)


def measured(run: Ended, *, step: int, split: str) -> dict[str, Any]:
    (row,) = [row for row in run.rows if (row["step"], row["split"]) == (step, split)]
    return row


@pytest.mark.slow
def test_a_run_of_a_version_with_fewer_keys_is_evaluated_and_loaded(tmp_path: Path) -> None:
    copy = tmp_path / run().directory.parent.name / run().directory.name
    shutil.copytree(run().directory, copy)
    config = recall(copy)
    for key in ("drop_last", "eval", "export", "logger", "trainer.divergence.back", "trainer.early_stopping.min_delta"):
        *sections, last = key.split(".")
        del functools.reduce(dict.__getitem__, sections, config)[last]  # a section
    freeze(config, copy)
    assert_equal(evaluated(copy, root=tmp_path / "none"), run().rows[-1])
    assert not load(copy).training


QUICK = {("single", 1), ("ddp", 3), ("fsdp", 2), ("tensor", 2), ("pipeline", 2), ("parameter-server", 2), ("pp+fsdp+tp", 4)}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("strategy", "ranks", "mesh"),
    [
        pytest.param(strategy, *layout, marks=[] if (strategy, layout[0]) in QUICK else [pytest.mark.slow])
        for strategy in options("parallel")
        if strategy not in FOR_EXPERTS
        for layout in layouts(strategy)
    ],
)
def test_every_strategy_and_world_size_measures_the_same(strategy: str, ranks: int, mesh: list[str], tmp_path: Path) -> None:
    line = [f"parallel={strategy}", f"launch.nproc_per_node={ranks}", *mesh]
    if ranks == 3 and strategy in ("tensor", "fsdp+tp"):  # of the model's four heads
        refused = command("mode=eval", f"run.dir={run().directory}", *line, root=tmp_path / "none")
        assert refused.code == 78 and ": 3: does not divide the " in refused.output
        return
    row = evaluated(run().directory, *line, root=tmp_path / "none")
    assert (row["step"], row["samples"], row["world_size"]) == (10, 13, ranks)
    assert_equal(row, measured(run(), step=10, split="test"))


@pytest.mark.slow
def test_every_checkpoint_and_split_can_be_named(tmp_path: Path) -> None:
    best = run().summary["metrics"]["val"]["best"]["step"]
    places = {"last": 10, "final": 10, "best": best, "4": 4, str(run().directory / "checkpoints" / "step_00000006"): 6}
    for place, step in places.items():
        row = evaluated(run().directory, f"run.checkpoint={place}", "eval.split=val", root=tmp_path / "none")
        assert (row["step"], row["split"], row["samples"]) == (step, "val", 11)
        assert_equal(row, measured(run(), step=step, split="val"))
    row = evaluated(run().directory, "eval.split=train", root=tmp_path / "none")
    assert row["samples"] == 40


@pytest.mark.slow
def test_a_run_in_fp32_measured_in_fp64_is_the_same_for_every_world_size(tmp_path: Path) -> None:
    line = ["dataset=synthetic", "dataset.num_train=32", "dataset.num_val=7", "dataset.num_test=15", "dataset.image_size=8",
            "model=cnn", "model.channels=[4,8]", "model.norm=batch", "global_batch_size=8", "trainer.max_epochs=2"]  # fmt: skip
    trained = finished(*line, root=tmp_path / "runs")
    ways = (["parallel=single"], ["parallel=fsdp", "launch.nproc_per_node=2"], ["parallel=ddp", "launch.nproc_per_node=3"])
    one, *others = (evaluated(trained.directory, "precision=fp64", *way, root=tmp_path / "none") for way in ways)
    for other in others:
        assert abs(other["loss"] - one["loss"]) <= 1e-10 * one["loss"]
        assert other["accuracy"] == one["accuracy"]
    assert abs(one["loss"] - measured(trained, step=8, split="test")["loss"]) <= 1e-5
    assert evaluated(trained.directory, root=tmp_path / "none")["loss"] == measured(trained, step=8, split="test")["loss"]


def contents(run: Path) -> dict[str, str]:
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in run.rglob("*") if path.is_file()
    }


def test_nothing_of_the_run_is_changed_and_the_result_is_printed(copy: Path, tmp_path: Path) -> None:
    before = contents(copy)
    ended = finished("mode=eval", f"run.dir={copy}", "parallel=ddp", "launch.nproc_per_node=2", root=tmp_path / "none")
    after = contents(copy)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"evaluations.jsonl", ".eval/frozen.yaml", ".eval/train.log", ".eval/lock"}
    names, values = ended.output.splitlines()[:2]
    assert names.split() == ["step", "split", "loss", "accuracy", "bits_per_token", "perplexity", "samples", "checkpoint", "precision",
                             "parallel", "world_size"]  # fmt: skip
    assert values.split()[:2] == ["10", "test"] and values.split()[7:] == ["step_00000010", "fp64", "ddp", "2"]
    assert [names.index(name) for name in ("split", "checkpoint")] == [values.index(text) for text in ("test", "step_")]


# --- while the run goes on


@pytest.mark.slow
def test_a_run_is_evaluated_while_it_trains(tmp_path: Path) -> None:
    line = [*RUN, "trainer.max_epochs=100000", "checkpoint.every=50", "trainer.eval_every=null", "checkpoint.keep_last=20"]
    training = begin(*line, root=tmp_path / "runs")
    try:
        wait_for_checkpoint(tmp_path / "runs")
        (directory,) = tmp_path.glob("runs/*/*")
        assert evaluated(directory, root=tmp_path / "none")["step"] % 50 == 0
        assert training.is_alive()
    finally:
        training.terminate()
        assert end(training, root=tmp_path / "runs").code == 75


def delete_before_loading() -> None:
    before_each(restored, "load_evaluated", lambda path, **_: shutil.rmtree(path))


@pytest.mark.slow
def test_a_checkpoint_that_the_run_deletes_meanwhile_is_said_to_be_gone(copy: Path, tmp_path: Path) -> None:
    gone = command("mode=eval", f"run.dir={copy}", root=tmp_path / "none", before=delete_before_loading)
    assert gone.code == 65
    assert "step_00000010: the active run has deleted it meanwhile: give the command again" in gone.output


# --- what is refused: with a line, before a process is started or a file written


def spoil_configuration(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.02", "lr: 0.03"))


def link_the_result_elsewhere(run: Path) -> None:
    (run / "evaluations.jsonl").symlink_to("/dev/null")


def leave(run: Path) -> None:
    pass


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("spoil", "line", "code", "said"),
    [
        (leave, "optimizer.lr=1", 78, "optimizer.lr: cannot be given to mode=eval: the mode uses the run as it is (only run.dir"),
        (leave, "launch.nnodes=2", 78, "parallel: single is one process, but 2 nodes of launch.nproc_per_node=1 give 2"),
        (leave, "eval.split=tst", 78, "eval.split: 'tst' is not valid (one of train, val, test, or val.NAME; did you mean test?)"),
        (leave, "parallel=tensor launch.nproc_per_node=3", 78, "parallel.tensor: 3: does not divide the 16 features"),
        (leave, "run.checkpoint=lst", 65, "(last, best, final, a path, or a step (the run has: 2, 4, 6, 8, 10))"),
        (lambda run: (run / "config.yaml").unlink(), "", 65, "is not a run: there is no config.yaml"),
        (spoil_configuration, "", 65, "config.yaml has changed since the run wrote it: its hash differs"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "", 65, "run.checkpoint: last, but there is no "),
        (lambda run: (run / "model.safetensors").unlink(), "run.checkpoint=final", 65, "run.checkpoint: final, but there is no "),
        (link_the_result_elsewhere, "", 65, "evaluations.jsonl is not a plain file"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_nothing_is_written(
    spoil: Callable[[Path], None], line: str, code: int, said: str, copy: Path, tmp_path: Path
) -> None:
    spoil(copy)
    before = contents(copy)
    refused = command("mode=eval", f"run.dir={copy}", *line.split(), root=tmp_path / "none")
    assert (refused.code, contents(copy)) == (code, before), refused.output
    assert said in refused.output


def test_two_evaluations_at_a_time_are_refused(tmp_path: Path) -> None:
    lock = Lock(run().directory / ".eval")
    lock.take()
    try:
        refused = command("mode=eval", f"run.dir={run().directory}", root=tmp_path / "none")
    finally:
        lock.release()
    assert refused.code == 1 and f".eval is in use by process {os.getpid()} on " in refused.output


def test_a_best_checkpoint_that_is_not_kept_is_said_to_be_gone(copy: Path, tmp_path: Path) -> None:
    best = run().summary["metrics"]["val"]["best"]["step"]
    shutil.rmtree(copy / "checkpoints" / f"step_{best:08d}")
    ended = finished("mode=eval", f"run.dir={copy}", "run.checkpoint=best", root=tmp_path / "none")
    assert f"the best val/loss was at step {best}, of which this run has no checkpoint" in ended.output


def test_without_a_run_and_in_a_sweep(tmp_path: Path) -> None:
    refused = command("mode=eval", root=tmp_path / "none")
    assert (refused.code, refused.output) == (78, "run.dir: is missing: mode=eval needs one run (run.dir=runs/NAME/ID)\n")
    swept = typed("-m", "mode=eval", f"run.dir={run().directory}", "eval.split=val,test", directory=tmp_path)
    assert swept.code == 78 and "mode: eval does nothing with a sweep (without -m)" in swept.output


def test_a_damaged_checkpoint_is_refused_if_named_and_passed_over_if_not(copy: Path, tmp_path: Path) -> None:
    flip_a_bit(next((copy / "checkpoints" / "step_00000010").glob("*.safetensors")), Random(0))
    for ranks in (1, 2):
        line = ["mode=eval", f"run.dir={copy}", "parallel=ddp", f"launch.nproc_per_node={ranks}", "run.checkpoint=10"]
        named = command(*line, root=tmp_path / "none")
        assert named.code == 65 and "does not match its checksum" in named.output
    assert evaluated(copy, root=tmp_path / "none")["step"] == 8


@pytest.mark.slow
def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    other = finished(*RUN, "model.dim=8", "trainer.max_epochs=1", root=tmp_path / "runs").directory
    for place, said in ((other / "checkpoints" / "step_00000004", "embedding.weight is torch.float64 [16, 8] in the checkpoint, "),
                        (other / "model.safetensors", "embedding.weight (F64 [16, 8] in the file, float64 [16, 16] in ")):  # fmt: skip
        refused = command("mode=eval", f"run.dir={run().directory}", f"run.checkpoint={place}", root=tmp_path / "none")
        assert refused.code == 65 and f"{place}: does not fit this run: " in refused.output and said in refused.output


# --- stopped


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_stops_it_and_nothing_is_written(ranks: int, copy: Path, tmp_path: Path) -> None:
    line = ["mode=eval", f"run.dir={copy}", "parallel=ddp", f"launch.nproc_per_node={ranks}"]
    stopped = command(*line, root=tmp_path / "none", before=lambda: signal_before(evaluate, "measure"))
    assert stopped.code == 75, stopped.output
    assert "stopped; nothing was written" in stopped.output
    assert ("SIGTERM: stopping\n" in stopped.output) == (
        ranks == 1
    )  # with more, it is the parent that speaks, and was sent nothing
    assert not (copy / "evaluations.jsonl").exists()


@pytest.mark.slow
def test_other_data_are_measured_and_their_row_names_them(tmp_path: Path) -> None:
    def row(*words: str) -> dict[str, Any]:
        return evaluated(run().directory, *words, root=tmp_path / "none")

    other = row("dataset.num_test=5")
    assert (other["samples"], other["dataset"]) == (5, "num_test=5")
    same = row("dataset.num_test=13", "dataset.num_workers=1")  # what the run has, fetched in another way
    assert same["samples"] == 13 and "dataset" not in same
    assert_equal(same, measured(run(), step=10, split="test"))
    chosen = row(
        "dataset=synthetic", "dataset.kind=tokens", "dataset.vocab_size=16", "dataset.seq_len=12", "dataset.num_test=7"
    )
    assert chosen["samples"] == 7 and "num_test=7" in chosen["dataset"] and "vocab_size" not in chosen["dataset"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_data_that_the_model_does_not_take_are_refused_with_the_shapes(ranks: int, tmp_path: Path) -> None:
    longer = ["dataset=synthetic", "dataset.kind=tokens", "dataset.vocab_size=16", "dataset.seq_len=24", "dataset.num_test=7"]
    where = ["mode=eval", f"run.dir={run().directory}", "parallel=ddp", f"launch.nproc_per_node={ranks}"]
    ended = command(*where, *longer, root=tmp_path / "none")
    assert ended.code == 78 and "dataset: the run's model or task does not take these samples: " in ended.output, ended.output
    assert "tokens int64 [157], now int64 [169]" in ended.output, ended.output
