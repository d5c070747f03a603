"""A run that fails says what, where and why, leaves what it had, and no process."""

import errno
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint.manifest import read_state
from framework.checkpoint.store import CheckpointStore
from framework.data.synthetic import Synthetic
from framework.engine.engine import Engine
from framework.runtime.environment import Environment
from tests.harness import assert_same_bits, before_each, command, finished
from tests.test_divergence import bad_batches
from tests.test_resume import RUN, STRATEGIES


def in_step_6(rank: int, act: Callable[[], None]) -> Callable[[], None]:
    def train(engine: Engine, step: Any, *, index: int, **_: Any) -> None:
        if index == 5 and Environment.read().rank == rank:
            act()

    return lambda: before_each(Engine, "train", train)


def fail() -> None:
    raise LookupError("the planted fault\nwith a second line")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("strategy", "rank"), [("ddp 2", 1), ("single", 0)])
def test_an_error_in_a_worker_is_told_in_three_lines(strategy: str, rank: int, tmp_path: Path) -> None:
    line = [*RUN, *STRATEGIES[strategy], "launch.max_restarts=0"]
    failed = command(*line, root=tmp_path / "runs", before=in_step_6(rank, fail))
    assert failed.code == 1
    told = failed.output[failed.output.index("[rank 0] ERROR") :].splitlines()
    assert told[0] == f"[rank 0] ERROR: rank {rank} failed: LookupError: the planted fault"
    assert told[1].startswith("  at ") and told[1].endswith("in fail")
    assert told[2] == f"  the whole log is in {failed.directory / 'train.log'}"
    assert len(told) == 3, failed.output
    assert f"[rank {rank}] ERROR Traceback" in (failed.directory / "train.log").read_text()
    assert failed.summary["status"] == "failed"
    assert failed.summary["error"] == f"rank {rank}: LookupError: the planted fault"


@pytest.mark.parametrize("strategy", ["single", pytest.param("ddp 2", marks=pytest.mark.slow)])
def test_a_component_that_exits_is_a_failure_and_not_the_runs_end(strategy: str, tmp_path: Path) -> None:
    def plant() -> None:
        before_each(Engine, "train", lambda *_, index, **__: sys.exit(0) if index == 5 else None)

    failed = command(*RUN, *STRATEGIES[strategy], "launch.max_restarts=0", root=tmp_path / "runs", before=plant)
    assert failed.code == 1 and failed.summary["status"] == "failed" and failed.summary["step"] == 4, failed.output
    told = r"rank \d failed: RuntimeError: the code calls sys\.exit\(0\)\n  at .*test_failures\.py:\d+ in <lambda>"
    assert re.search(told, failed.output), failed.output


class Exits(Synthetic):
    def problems(self) -> Any:
        sys.exit(0)


def test_a_check_that_exits_ends_no_command_with_0(tmp_path: Path) -> None:
    failed = command(*RUN, "dataset._target_=tests.test_failures.Exits", root=tmp_path / "runs")
    assert failed.code not in (0, 75) and "sys.exit(0)" in failed.output, failed.output


@pytest.mark.slow
def test_an_error_that_comes_again_is_not_tried_a_third_time(tmp_path: Path) -> None:
    failed = command(*RUN, *STRATEGIES["ddp 2"], root=tmp_path / "runs", before=in_step_6(1, fail))
    assert failed.code == 1
    assert re.findall(r"restart (\d of \d)", failed.output) == ["1 of 3"]
    assert failed.summary["restarts"] == 1


@pytest.mark.slow
def test_nor_is_a_library_that_aborts_again(tmp_path: Path) -> None:
    """As gloo does where the ranks' collectives differ."""
    failed = command(*RUN, *STRATEGIES["ddp 2"], root=tmp_path / "runs", before=in_step_6(1, os.abort))
    assert failed.code == 1
    # a look at the workers may come too late to see who was first: then it is "killed, without a message"
    assert re.findall(r"restart (\d of \d)", failed.output) in (["1 of 3"], ["1 of 3", "2 of 3"])
    assert failed.summary["error"].startswith("rank 1: killed")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("strategy", "log_every"), [("ddp 2", 50), ("single", 1), ("fsdp 2", 50)])
def test_a_loss_that_is_not_finite_ends_the_run_without_a_checkpoint_of_it(
    strategy: str, log_every: int, tmp_path: Path
) -> None:
    line = [*RUN, *STRATEGIES[strategy], f"trainer.log_every={log_every}", "trainer.eval_every=null"]
    failed = command(*line, root=tmp_path / "runs", before=bad_batches(132))  # of step 10
    assert failed.code == 70, failed.output
    names = sorted(path.name for path in (failed.directory / "checkpoints").iterdir())
    assert names == ["step_00000004", "step_00000008"] and "not finite" in failed.summary["error"]
    for name in names:
        state = read_state(failed.directory / "checkpoints" / name)
        assert state["progress"]["step"] == int(name[-8:])


def from_the_first_save(act: Callable[[], object]) -> Callable[[], None]:
    return lambda: before_each(CheckpointStore, "save", lambda *_, **__: act())


def let_no_file_grow() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def let_no_flush_succeed() -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.fsync = fsync


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "disk_fails"), [("ddp 2", let_no_flush_succeed), ("single", let_no_file_grow)])
def test_a_disk_without_room_for_anything_ends_the_run_quietly(
    strategy: str, disk_fails: Callable[[], None], tmp_path: Path
) -> None:
    line = [*RUN, *STRATEGIES[strategy], "checkpoint.max_failures=0"]
    whole = finished(*line, root=tmp_path / "whole")
    reader, writer = os.pipe()

    def plant() -> None:
        os.dup2(writer, 2)  # what is told must not need the disk either
        from_the_first_save(disk_fails)()

    failed = command(*line, root=tmp_path / "runs", before=plant)
    os.close(writer)
    with open(reader) as pipe:
        told = pipe.read()
    assert failed.code == 74, told
    assert "Traceback" not in told and "Logging error" not in told
    assert "restart" not in told
    assert re.search(
        r"\n\[rank 0\] ERROR: (metrics|checkpoint of step 4) not written: rank 0: \[Errno \d+\] (File|No)", told
    ), told
    assert re.search(r"\n\[rank 0\] WARNING: .*/summary.json could not be written: (File|No) ", told), told
    assert not list(failed.directory.glob(".*")) and not list(failed.directory.glob("checkpoints/*"))
    assert_same_bits(finished(*line, root=tmp_path / "runs"), whole)


def plant_broken_sample() -> None:
    def transform(self: Synthetic, inputs: torch.Tensor, targets: torch.Tensor, *, keys: object) -> None:
        raise ValueError("the planted broken sample")

    Synthetic.transform = transform


def test_an_error_in_a_loader_process_ends_the_run_and_the_process(tmp_path: Path) -> None:
    line = [*RUN, *STRATEGIES["ddp 2"], "dataset.num_workers=2", "launch.max_restarts=0"]
    failed = command(*line, root=tmp_path / "runs", before=plant_broken_sample, timeout_s=30, leave=sys.exit)
    assert failed.code == 1
    told = failed.output[failed.output.index("[rank 0] ERROR") :].splitlines()
    assert told[0].endswith("failed: ValueError: the planted broken sample")
    assert re.fullmatch(r"  at .*test_failures.py:\d+ in transform", told[1])  # not where torch raised it again
