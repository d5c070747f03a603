"""Checkpoints written beside the steps: the same files by the same protocol, and the steps do not wait."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from framework.checkpoint.manifest import read_state
from framework.checkpoint.store import CheckpointStore
from framework.runs.metrics_file import MACHINE
from framework.runtime.environment import Environment
from framework.training.loop import Trainer
from tests.harness import after_each, assert_same_bits, command, finished, once
from tests.test_resume import RUN, STRATEGIES

ASYNC, SYNC = "checkpoint.async_save=true", "checkpoint.async_save=false"
CASES = ["ddp 2", "fsdp 2"]


def in_each_save(act: Callable[[int], None]) -> Callable[[], None]:
    """Return what makes every rank `act` on the step that is saved when it has written its part of a checkpoint."""
    return lambda: after_each(CheckpointStore, "_write", lambda store, beside, tensors: act(int(beside.name[-8:])))


def on_steps(act: Callable[[int], object]) -> None:
    """Have every rank `act` on the number of each step that it has taken."""
    after_each(Trainer, "train_step", lambda trainer, *_, **__: act(trainer.progress.step))


def held_back(num_steps: int, *, longer_s: float = 0.0) -> Callable[[], None]:
    """Return what makes every save hold its files back until so many more of the 21 steps are taken, and a moment longer."""
    taken, last = threading.Condition(), [0]

    def note(step: int) -> None:
        with taken:
            last[0] = step
            taken.notify_all()

    def wait(saved: int) -> None:
        with taken:
            goes_on = taken.wait_for(lambda: last[0] >= min(saved + num_steps, 21), timeout=30)
        assert goes_on, "training has waited for the checkpoint"
        time.sleep(longer_s)

    def plant() -> None:
        on_steps(note)
        in_each_save(wait)()

    return plant


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CASES)
def test_steps_go_on_while_a_checkpoint_is_written(strategy: str, tmp_path: Path) -> None:
    """With a save that blocks, two more steps are never taken."""
    ended = finished(*RUN, *STRATEGIES[strategy], ASYNC, root=tmp_path / "runs", before=held_back(2))
    assert_same_bits(ended, once(*RUN, *STRATEGIES[strategy], SYNC))
    theirs = once(*RUN, *STRATEGIES[strategy], SYNC).directory / "checkpoints"
    for path in sorted(theirs.glob("*/*.safetensors")):
        expected, actual = load_file(path), load_file(ended.directory / "checkpoints" / path.relative_to(theirs))
        assert actual.keys() == expected.keys()
        for key in expected:
            assert torch.equal(actual[key], expected[key]), f"{key} is not what it was after its own step"
    for path in sorted(theirs.iterdir()):
        plain, expected = (read_state(one) for one in (ended.directory / "checkpoints" / path.name, path))
        for state in (plain, expected):  # what a clock has measured
            del state["record_id"], state["rows"]["num_bytes"], state["rows"]["crc32"]  # of each record's own
            for name in ("wall_s", "train_s", "began"):
                del state["progress"][name]
            for row in (row for split in state["metrics"].values() for row in split.values()):
                for name in MACHINE:
                    row.pop(name, None)
        assert plain == expected
    assert ended.summary["saves"]["committed"] == 6


@pytest.mark.quick(1)
@pytest.mark.parametrize("strategy", CASES)
def test_an_error_surfaces_at_the_next_steps(strategy: str, tmp_path: Path) -> None:
    def fail(step: int) -> None:
        environment = Environment.read()
        if environment.rank == environment.world_size - 1:
            raise OSError(errno.EIO, "the planted fault")

    line = [*RUN, *STRATEGIES[strategy], ASYNC, "checkpoint.every=9", "checkpoint.max_failures=0", "trainer.max_epochs=30"]

    def plant() -> None:
        in_each_save(fail)()
        on_steps(lambda step: time.sleep(0.1 if step > 9 else 0))  # a step of a model that is worth the thread

    failed = command(*line, root=tmp_path / "runs", before=plant)
    assert failed.code == 74, failed.output
    rank = int(strategy[-1]) - 1 if strategy != "single" else 0
    assert f"checkpoint of step 9 not written: rank {rank}: [Errno 5] the planted fault" in failed.output
    assert 9 < failed.summary["step"] < 18, "not only at the next save"
    assert failed.summary["saves"] == {"committed": 0, "failed": 1, "waited_for": 0}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CASES)
def test_a_save_that_is_due_too_early_waits_and_is_counted(strategy: str, tmp_path: Path) -> None:
    before = held_back(4, longer_s=0.5)  # the next save is due after four steps
    ended = finished(*RUN, *STRATEGIES[strategy], ASYNC, root=tmp_path / "runs", before=before)
    assert ended.summary["saves"]["waited_for"] >= 3
    assert_same_bits(ended, once(*RUN, *STRATEGIES[strategy], SYNC))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ASYNC, SYNC])
@pytest.mark.parametrize("strategy", CASES)
def test_a_few_failures_in_a_row_are_warnings(strategy: str, mode: str, tmp_path: Path) -> None:
    """Two of the five periodic saves fail on one rank; the others are as if nothing had happened."""

    def fail(step: int) -> None:
        if step in (8, 12) and Environment.read().rank == Environment.read().world_size - 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    line = [*RUN, *STRATEGIES[strategy], mode, "checkpoint.max_failures=2"]
    ended = finished(*line, root=tmp_path / "runs", before=in_each_save(fail))
    assert ended.output.count("training continues (failure ") == 2
    assert "(failure 2 in a row; checkpoint.max_failures allows 2)" in ended.output
    assert ended.summary["saves"]["committed"] == 4 and ended.summary["saves"]["failed"] == 2
    assert_same_bits(ended, once(*RUN, *STRATEGIES[strategy], SYNC))


def test_the_last_save_may_not_fail(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 21:
            raise OSError(errno.ENOSPC, "No space left on device")

    failed = command(*RUN, root=tmp_path / "runs", before=in_each_save(fail))
    assert failed.code == 74
    assert not (failed.directory / "model.safetensors").exists()


# --- a grace period that is shorter than a save


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CASES)
def test_without_the_time_for_a_checkpoint_it_says_so_and_relies_on_the_last(strategy: str, tmp_path: Path) -> None:
    def plant() -> None:
        in_each_save(lambda step: time.sleep(0.6))()
        on_steps(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 10 else None)

    line = [*RUN, *STRATEGIES[strategy], SYNC]
    stopped = command(*line, "launch.grace_s=0.5", root=tmp_path / "short", before=plant)
    assert stopped.code == 75, stopped.output
    assert " s of launch.grace_s are left, and the last checkpoint took " in stopped.output
    assert "continues from the checkpoint of step 8" in stopped.output
    assert_same_bits(finished(*line, root=tmp_path / "short"), once(*RUN, *STRATEGIES[strategy], SYNC))
    enough = command(*line, "launch.grace_s=60", root=tmp_path / "long", before=plant)
    assert enough.code == 75
    assert (enough.directory / "checkpoints" / f"step_{enough.summary['step']:08d}").exists()
