"""A run that was interrupted ends as if nothing had happened."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.environment import Environment
from framework.preemption import PREEMPTION
from framework.trainer import Trainer
from tests.harness import Ended, assert_close, assert_same_bits, command, exact_rows, finished

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


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return {name: finished(*RUN, *strategy, root=folder / name) for name, strategy in STRATEGIES.items()}


def after_step(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """Return what makes every rank of a command `act` at the end of that optimizer step."""

    def plant() -> None:
        original = Trainer.train_step

        def train_step(self: Trainer, *args: object, **kwargs: object) -> object:
            result = original(self, *args, **kwargs)
            if self.progress.step == number:
                act()
            return result

        Trainer.train_step = train_step

    return plant


def preempt() -> None:
    PREEMPTION.signum = signal.SIGTERM


def crash() -> None:
    """Die without a word, with everyone: as in a power cut."""
    if Environment.read().world_size > 1:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_preempted_twice_in_a_row_it_ends_with_the_same_bits(
    strategy: str, cut: int, uninterrupted: dict[str, Ended], tmp_path: Path
) -> None:
    line = [*RUN, *STRATEGIES[strategy]]
    for step in (cut, cut + 2):
        stopped = command(*line, root=tmp_path / "runs", before=after_step(step, preempt))
        assert stopped.code == 75, stopped.output
        assert stopped.summary["status"] == "preempted"
    assert_same_bits(finished(*line, root=tmp_path / "runs"), uninterrupted[strategy])


@pytest.mark.parametrize("cut", [2, 10, 19])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_between_checkpoints_it_ends_with_the_same_bits(
    strategy: str, cut: int, uninterrupted: dict[str, Ended], tmp_path: Path
) -> None:
    line = [*RUN, *STRATEGIES[strategy]]
    killed = command(*line, root=tmp_path / "runs", before=after_step(cut, crash))
    assert killed.code == -signal.SIGKILL
    ended = finished(*line, root=tmp_path / "runs")
    assert_same_bits(ended, uninterrupted[strategy])
    assert ended.summary["restarts"] == 1


def test_each_step_is_in_metrics_jsonl_once(uninterrupted: dict[str, Ended]) -> None:
    rows = exact_rows(uninterrupted["single"])
    assert [row["step"] for row in rows if row["split"] == "train"] == list(range(1, 22))
    assert [row["step"] for row in rows if row["split"] == "val"] == [5, 10, 15, 20, 21]
    assert [row["step"] for row in rows if row["split"] == "test"] == [21]


# --- from any strategy to any other: in float64, with the micro-batches fixed, so that the numbers agree

ACROSS = [*RUN, "precision=fp64", "micro_batch_size=4", "checkpoint.every=null"]


@pytest.fixture(scope="session")
def across(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return finished(*ACROSS, root=tmp_path_factory.mktemp("across") / "runs")


@pytest.mark.parametrize(
    ("first", "second"),
    [("single", "ddp 3"), ("ddp 3", "fsdp 2"), ("fsdp 2", "ddp 2"), ("fsdp 2", "single"), ("ddp 2", "fsdp 2")],
)
def test_a_run_continues_under_another_strategy(first: str, second: str, across: Ended, tmp_path: Path) -> None:
    begun = command(*ACROSS, *STRATEGIES[first], root=tmp_path / "first", before=after_step(9, preempt))
    assert begun.code == 75, begun.output
    line = [*ACROSS, *STRATEGIES[second], f"run.resume={begun.directory}"]
    assert_close(finished(*line, root=tmp_path / "second"), across)


def test_a_run_continues_on_another_number_of_processes(across: Ended, tmp_path: Path) -> None:
    line = [*ACROSS, "parallel=ddp"]
    for ranks, step in ((3, 5), (2, 9), (4, 14)):
        root = tmp_path / "runs"
        stopped = command(*line, f"launch.nproc_per_node={ranks}", root=root, before=after_step(step, preempt))
        assert stopped.code == 75, stopped.output
    assert_close(finished(*line, "launch.nproc_per_node=1", root=tmp_path / "runs"), across)
