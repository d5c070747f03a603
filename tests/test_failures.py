"""A run that fails says what, where and why, leaves what it had, and no process."""

import json
import resource
import sys
from pathlib import Path

import pytest
import torch

from framework.checkpoint.store import CheckpointStore
from framework.data.synthetic import Synthetic
from framework.engine import DataParallelEngine
from framework.environment import Environment
from tests.harness import assert_same_bits, command, finished
from tests.test_resume import RUN, STRATEGIES, after_step, preempt


def plant_error(rank: int) -> None:
    original = DataParallelEngine.forward_backward

    def forward_backward(self, step, *, index, **options):  # type: ignore[no-untyped-def]
        if index == 5 and Environment.read().rank == rank:
            raise LookupError("the planted fault\nwith a second line")
        return original(self, step, index=index, **options)

    DataParallelEngine.forward_backward = forward_backward  # type: ignore[method-assign]


@pytest.mark.parametrize(("strategy", "rank"), [("single", 0), ("ddp 2", 1), ("ddp 3", 2), ("fsdp 2", 0)])
def test_an_error_in_a_worker_is_told_in_three_lines(strategy: str, rank: int, tmp_path: Path) -> None:
    line = [*RUN, *STRATEGIES[strategy], "launch.max_restarts=0"]
    failed = command(*line, root=tmp_path / "runs", before=lambda: plant_error(rank))
    assert failed.code == 1
    told = failed.output[failed.output.index("[rank 0] ERROR") :].splitlines()
    assert told[0] == f"[rank 0] ERROR: rank {rank} failed: LookupError: the planted fault"
    assert told[1].startswith("  at ") and told[1].endswith("in forward_backward")
    assert told[2] == f"  the whole story is in {failed.directory / 'train.log'}"
    assert len(told) == 3, failed.output
    assert f"[rank {rank}] ERROR Traceback" in (failed.directory / "train.log").read_text()
    assert failed.summary["status"] == "failed"
    assert failed.summary["error"] == f"rank {rank}: LookupError: the planted fault"


def plant_nan(rank: int, step: int) -> None:
    original = DataParallelEngine.forward_backward

    def forward_backward(self, batch, *, index, **options):  # type: ignore[no-untyped-def]
        if index == step and Environment.read().rank == rank:
            poisoned = [m._replace(inputs=torch.full_like(m.inputs, float("nan"))) for m in batch.micro_batches]
            batch = batch._replace(micro_batches=poisoned)
        return original(self, batch, index=index, **options)

    DataParallelEngine.forward_backward = forward_backward  # type: ignore[method-assign]


@pytest.mark.parametrize("log_every", [1, 50])
@pytest.mark.parametrize(("strategy", "rank"), [("single", 0), ("ddp 2", 1), ("fsdp 2", 1)])
def test_a_loss_that_is_not_finite_ends_the_run_without_a_checkpoint_of_it(
    strategy: str, rank: int, log_every: int, tmp_path: Path
) -> None:
    line = [*RUN, *STRATEGIES[strategy], f"trainer.log_every={log_every}", "trainer.eval_every=null"]
    failed = command(*line, root=tmp_path / "runs", before=lambda: plant_nan(rank, step=9))  # checkpoints at 4, 8, 12
    assert failed.code == 70, failed.output
    assert "not finite" in failed.summary["error"]
    names = sorted(path.name for path in (failed.directory / "checkpoints").iterdir())
    assert names == ["step_00000004", "step_00000008"]
    for name in names:
        state = json.loads((failed.directory / "checkpoints" / name / "state.json").read_text())
        assert state["progress"]["step"] == int(name[-8:])


def plant_broken_data() -> None:
    def load(self: Synthetic, split: str) -> None:
        raise ValueError("dataset.root: the planted broken file")

    Synthetic.load = load  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("strategy", ["single", "ddp 2"])
def test_data_that_cannot_be_loaded_ends_the_run_at_once(strategy: str, tmp_path: Path) -> None:
    line = [*RUN, *STRATEGIES[strategy], "launch.max_restarts=0"]
    failed = command(*line, root=tmp_path / "runs", before=plant_broken_data, timeout_s=30)
    assert failed.code == 1
    assert "ValueError: dataset.root: the planted broken file" in failed.output


def plant_full_disk() -> None:
    """From the first save on, no file may grow beyond 16 KiB: rows and log fit, a checkpoint's tensors do not."""
    save = CheckpointStore.save

    def limited(*args, **kwargs):  # type: ignore[no-untyped-def]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
        return save(*args, **kwargs)

    CheckpointStore.save = limited  # type: ignore[method-assign]


@pytest.mark.parametrize("strategy", ["single", "ddp 2", "fsdp 2"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_the_last_one_intact(
    strategy: str, tmp_path: Path
) -> None:
    line = [*RUN, *STRATEGIES[strategy], "model.channels=[16,32]", "trainer.log_every=5"]
    whole = finished(*line, root=tmp_path / "whole")
    begun = command(*line, root=tmp_path / "runs", before=after_step(6, preempt))
    assert begun.code == 75, begun.output
    failed = command(*line, root=tmp_path / "runs", before=plant_full_disk)
    assert failed.code == 74, failed.output
    assert "checkpoint not written: rank 0: " in failed.output
    assert failed.summary["status"] == "failed"
    assert_same_bits(finished(*line, root=tmp_path / "runs"), whole)


def plant_broken_sample() -> None:
    def transform(self: Synthetic, inputs: torch.Tensor, targets: torch.Tensor, *, keys: object) -> None:
        raise ValueError("the planted broken sample")

    Synthetic.transform = transform  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("strategy", ["single", "ddp 2"])
def test_an_error_in_a_loader_process_ends_the_run_and_the_process(strategy: str, tmp_path: Path) -> None:
    line = [*RUN, *STRATEGIES[strategy], "dataset.num_workers=2", "launch.max_restarts=0"]
    failed = command(*line, root=tmp_path / "runs", before=plant_broken_sample, timeout_s=30, leave=sys.exit)
    assert failed.code == 1
    assert "failed: ValueError: the planted broken sample" in failed.output
