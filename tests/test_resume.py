"""A run that was interrupted ends as if nothing had happened."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.checkpoint.manifest import read_state
from framework.runtime.environment import Environment
from framework.runtime.preemption import PREEMPTION
from framework.training.loop import Trainer
from tests.harness import Ended, after_each, assert_same_bits, command, finished, once

# 7 steps an epoch, of which the last is short (4 of 16 samples); 21 steps; BatchNorm, dropout and augmentation on
RUN = [
    "dataset=synthetic", "dataset.num_train=100", "dataset.num_val=30", "dataset.num_test=30", "dataset.image_size=8",
    "dataset.augment=true", "model=cnn", "model.channels=[4,8]", "model.norm=batch", "model.dropout=0.1",
    "global_batch_size=16", "trainer.max_epochs=3", "trainer.log_every=1", "trainer.eval_every=5", "checkpoint.every=4",
    "trainer.ema_decay=0.9",
]  # fmt: skip
STRATEGIES = {
    "single": [],
    "ddp 2": ["parallel=ddp", "launch.nproc_per_node=2"],
    "ddp 3": ["parallel=ddp", "launch.nproc_per_node=3"],
    "fsdp 2": ["parallel=fsdp", "launch.nproc_per_node=2"],
}
# mid-epoch, the step before the short batch, the short batch itself (an epoch's end), the first of an epoch
CUTS = [3, 6, 7, 8]


def after_step(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """Return what makes every rank of a command `act` at the end of that optimizer step."""

    def look(trainer: Trainer, *_: object, **__: object) -> None:
        if trainer.progress.step == number:
            act()

    return lambda: after_each(Trainer, "train_step", look)


def preempt() -> None:
    PREEMPTION.signum = signal.SIGTERM


def crash() -> None:
    """Die without a word, with everyone: as in a power cut."""
    if Environment.read().world_size > 1:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def preempted(*line: str, at: int, root: Path) -> Ended:
    """Stop a run with a checkpoint after a step; several ranks agree a step later."""
    ended = command(*line, root=root, before=after_step(at, preempt))
    assert ended.code == 75, ended.output
    return ended


def killed_and_continued(*line: str, at: int, root: Path) -> Ended:
    """Kill a run after a step, and give its command again; return how that ends."""
    assert command(*line, root=root, before=after_step(at, crash)).code < 0
    return finished(*line, root=root)


def assert_survives_a_kill(*line: str, at: int, root: Path) -> Ended:
    """Compare a run that is killed after a step and continued with one that is not, which is returned."""
    whole = finished(*line, root=root / "whole")
    assert_same_bits(killed_and_continued(*line, at=at, root=root / "cut"), whole)
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "cut"), [*zip(STRATEGIES, CUTS)])
def test_preempted_twice_in_a_row_it_ends_with_the_same_bits(strategy: str, cut: int, tmp_path: Path) -> None:
    line = [*RUN, *STRATEGIES[strategy]]
    for step in (cut, cut + 2):
        stopped = preempted(*line, at=step, root=tmp_path / "runs")
        assert stopped.summary["status"] == "preempted"
    assert_same_bits(finished(*line, root=tmp_path / "runs"), once(*RUN, *STRATEGIES[strategy]))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "cut"), [("single", 2), ("ddp 2", 10), ("fsdp 2", 19)])
def test_killed_between_checkpoints_it_ends_with_the_same_bits(strategy: str, cut: int, tmp_path: Path) -> None:
    line = [*RUN, *STRATEGIES[strategy]]
    killed = command(*line, root=tmp_path / "runs", before=after_step(cut, crash))
    assert killed.code == -signal.SIGKILL
    ended = finished(*line, root=tmp_path / "runs")
    assert_same_bits(ended, once(*RUN, *STRATEGIES[strategy]))
    assert ended.summary["restarts"] == 1


# --- from any strategy to any other: in float64, with the micro-batches fixed, so that the numbers agree

ACROSS = [*RUN, "precision=fp64", "micro_batch_size=4", "checkpoint.every=null"]


# --- from another run, and from records that somebody has damaged


@pytest.mark.slow
def test_a_run_that_begins_with_another_has_its_own_test_row_alone(tmp_path: Path) -> None:
    shorter = finished(*ACROSS, "trainer.max_epochs=1", root=tmp_path / "first")
    longer = finished(*ACROSS, "trainer.max_epochs=2", f"run.resume={shorter.directory}", root=tmp_path / "second")
    assert [(row["step"], row["split"]) for row in longer.rows if row["split"] == "test"] == [(14, "test")]
    assert [row["step"] for row in longer.rows if row["split"] == "train"] == list(range(1, 15))
    again = command(*ACROSS, "trainer.max_epochs=2", f"run.resume={shorter.directory}", root=tmp_path / "second")
    assert again.code == 0 and "finished already, at step 14" in again.output


@pytest.mark.slow
def test_where_a_run_began_does_not_change(tmp_path: Path) -> None:
    """Otherwise a command would return what another beginning has computed: run.resume is not part of the id."""
    line, asked = [*ACROSS, "trainer.max_epochs=2"], lambda *resume: command(*line, *resume, root=tmp_path / "own")
    first = finished(*ACROSS, "trainer.max_epochs=1", root=tmp_path / "first")
    other = finished(*ACROSS, "trainer.max_epochs=1", "seed=1", root=tmp_path / "other")
    named = f"run.resume={first.directory}"
    stopped = preempted(*line, named, at=10, root=tmp_path / "own")
    assert stopped.summary["began_from"]["step"] == 7
    for resume in ([], [f"run.resume={other.directory}"], [f"{named}/checkpoints/step_00000001"]):
        refused = asked(*resume)
        assert refused.code == 78 and f"began from {first.directory}, of step 7, and not " in refused.output, refused.output
    moved = first.directory.rename(first.directory.with_name("moved"))
    assert asked(f"run.resume={moved}", "trainer.log_every=2", "run.code=accept", "mode=check").code == 0
    shutil.rmtree(moved)
    assert asked(named).code == 0
    finished(*line, root=tmp_path / "fresh")
    refused = command(*line, f"run.resume={other.directory}", root=tmp_path / "fresh")
    assert (
        refused.code == 78
        and f"began at step 0, and not from {other.directory} (run.resume=auto continues it" in refused.output
    )


def test_of_equally_good_checkpoints_the_earliest_is_the_best(tmp_path: Path) -> None:
    line = ["model=mlp", "dataset=synthetic", "trainer.max_epochs=null", "trainer.max_steps=8", "trainer.eval_every=2",
            "checkpoint.every=2", "checkpoint.keep_last=1", "checkpoint.keep_best=1", "checkpoint.monitor=val/accuracy",
            "checkpoint.mode=max", "optimizer.lr=1e-12", "rehearse=false"]  # fmt: skip
    ended = finished(*line, root=tmp_path)
    assert ended.summary["metrics"]["val"]["best"]["step"] == 2
    assert sorted(path.name for path in (ended.directory / "checkpoints").iterdir()) == ["step_00000002", "step_00000008"]


def test_what_is_best_and_when_to_stop_follow_from_the_runs_own_settings(tmp_path: Path) -> None:
    other = ["checkpoint.mode=max", "trainer.early_stopping.monitor=val/accuracy", "trainer.early_stopping.mode=max"]
    first = finished(*RUN, *other, "trainer.early_stopping.patience=99", "trainer.max_epochs=1", root=tmp_path / "first")
    ended_at = time.time()
    own = ["trainer.early_stopping.patience=99", "trainer.max_epochs=2", f"run.resume={first.directory}"]
    second = finished(*RUN, *own, root=tmp_path / "second")
    losses = {row["loss"]: row["step"] for row in second.rows if row["split"] == "val"}
    state = read_state(max(second.directory.glob("checkpoints/*")))
    assert state["patience"]["best"] == min(losses), "and not the other run's, an accuracy"
    assert second.summary["metrics"]["val"]["best"]["step"] == losses[min(losses)]
    assert second.summary["began"] >= ended_at and second.summary["wall_s"] < time.time() - ended_at


def test_a_checkpoint_that_leaves_nothing_to_train_is_refused(tmp_path: Path) -> None:
    line = [*ACROSS, "trainer.max_epochs=3", "name=other", f"run.resume={once(*ACROSS).directory}"]
    refused = command(*line, root=tmp_path / "second")
    assert refused.code == 65
    assert "leaves nothing to train: it has taken 21 steps, and this run ends after 21" in refused.output
    assert "is off for the rest" not in refused.output
    assert not list(refused.directory.glob("checkpoints/*"))


@pytest.mark.slow
def test_a_finished_run_whose_weights_are_cut_short_writes_them_again(tmp_path: Path) -> None:
    ended = finished(*RUN, root=tmp_path / "runs")
    with open(ended.directory / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    assert_same_bits(finished(*RUN, root=tmp_path / "runs"), once(*RUN))
