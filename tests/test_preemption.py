"""Any of five signals, to any process, at any moment: every rank stops after the same step, with a checkpoint."""

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import framework.preflight.dry_build
from framework.build.training import Builder
from framework.checkpoint.manifest import read_state
from framework.checkpoint.store import CheckpointStore
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.runtime.environment import Environment
from framework.runtime.preemption import PREEMPTION
from framework.training.loop import Trainer
from tests.harness import (
    after_each,
    assert_close,
    assert_same_bits,
    before_each,
    begin,
    command,
    end,
    exact_rows,
    finished,
    note_steps,
    once,
    wait_for,
)
from tests.test_conformance import MODELS
from tests.test_conformance import RUN as OF_CONFORMANCE
from tests.test_resume import RUN, STRATEGIES

LINE = [*RUN, "micro_batch_size=3", "checkpoint.every=4"]  # 21 steps of six micro-batches; an evaluation after every fifth
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]
STEP = 5


def once_at(owner: Any, name: str, condition: Callable[..., bool], act: Callable[[], None]) -> None:
    """Have the first call of `owner.name` that meets the condition `act` before it runs, in each process."""
    note_steps()
    done = [False]

    def look(*args: Any, **kwargs: Any) -> None:
        if not done[0] and condition(*args, **kwargs):
            done[0] = True
            act()

    before_each(owner, name, look)


# moment -> (where, the call's name, which of its calls)
MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "start-up": (Builder, "trainer", lambda *_, **__: True),
    "training": (Trainer, "train_step", lambda trainer, *_, **__: trainer.progress.step == STEP - 1),
    # the second of either rank's three
    "accumulation": (Forward, "seed_draws", lambda _, step, micro_batch, **others: step == STEP - 1 and micro_batch in (1, 4)),
    "evaluation": (Forward, "measured", lambda forward, *_, **__: not torch.is_grad_enabled() and forward.latest == STEP - 1),
    "saving": (CheckpointStore, "_write", lambda store, beside, tensors: beside.name.endswith("4")),
}
VICTIMS = ["rank 0", "rank 1", "all ranks", "agent"]
# every pair of a moment with a victim, and every signal with each victim and nearly each moment, is among these
CASES = [
    (moment, victim, SIGNALS[(i + j) % 5])
    for (i, moment), (j, victim) in itertools.product(enumerate(MOMENTS), enumerate(VICTIMS))
]


def plant(moment: str, victim: str, signum: int) -> None:
    def strike() -> None:
        rank = Environment.read().rank
        if victim == "agent" and rank == 0:
            os.kill(os.getppid(), signum)
        elif victim == "all ranks" or victim == f"rank {rank}":
            os.kill(os.getpid(), signum)

    once_at(*MOMENTS[moment], strike)


EVALUATIONS = [*RUN, "trainer.max_epochs=1", "trainer.eval_every=4", "checkpoint.every=null", "micro_batch_size=4",
               "dataset.num_val=60", "dataset.num_test=60"]  # fmt: skip


def plant_stop(step: int, split: str) -> Callable[[], None]:
    """Have a process ask for a stop after the first batch of an evaluation."""

    armed = [False]

    def arm(trainer: Trainer, of: str, **_: Any) -> None:
        armed[0] = (trainer.progress.step, of) == (step, split)

    def strike(*_: Any) -> None:
        PREEMPTION.signum = signal.SIGTERM if armed[0] else PREEMPTION.signum

    return lambda: (before_each(Trainer, "evaluate", arm), after_each(Engine, "evaluate", strike))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("single", []),
        pytest.param("ddp 2", ["metric=auroc"], marks=pytest.mark.slow),
        pytest.param("fsdp 2", ["dataset.num_workers=1"], marks=pytest.mark.slow),
    ],
)
def test_a_stop_breaks_off_an_evaluation_which_the_same_command_makes_first(
    strategy: str, more: list[str], tmp_path: Path
) -> None:
    """Twice: in the evaluation of step 4, and in the test at the end, after which nothing is left to train."""
    line, root = [*EVALUATIONS, *STRATEGIES[strategy], *more], tmp_path / "runs"
    for step, split, left in ((4, "val", ["val"]), (7, "test", ["test"])):
        stopped = command(*line, root=root, before=plant_stop(step, split))
        assert stopped.code == 75, stopped.output
        assert [(row["step"], row["split"]) for row in stopped.rows][-1] == (step, "train" if split == "val" else "val")
        (path,) = stopped.directory.glob(f"checkpoints/step_{step:08d}")
        assert read_state(path)["evaluations_left"] == left
    ended = finished(*line, root=root)
    assert_same_bits(ended, once(*line))
    for split in ("val", "test"):
        assert ended.summary["metrics"][split] == once(*line).summary["metrics"][split]


@pytest.mark.slow
def test_a_part_with_hooks_on_one_rank_has_all_ranks_finish_the_evaluation(tmp_path: Path) -> None:
    line = [*OF_CONFORMANCE, *MODELS["gpt, tied"], "trainer.max_steps=6", "trainer.eval_every=4", "checkpoint.every=null",
            "parallel=ddp", "launch.nproc_per_node=2", "launch.timeout_s=10", "+part.hooks._target_=tests.own_parts.Hooks",
            "dataset.num_val=60", "trainer.log_every=1"]  # fmt: skip
    stopped = command(*line, root=tmp_path / "runs", before=plant_stop(4, "val"))
    assert stopped.code == 75 and stopped.rows[-1]["split"] in ("val", "train") and stopped.rows[-1]["step"] >= 4, (
        stopped.output
    )
    assert read_state(max(stopped.directory.glob("checkpoints/*")))["evaluations_left"] == []
    assert_same_bits(finished(*line, root=tmp_path / "runs"), once(*line))


class Counts(nn.Module):
    """A model whose buffer counts the batches of evaluations, and which computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 10)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.seen += 1
        return self.layer(inputs.flatten(1)) * (1 + 0.01 * self.seen)


@pytest.mark.slow
def test_what_a_model_counts_in_an_evaluation_is_not_counted_twice(tmp_path: Path) -> None:
    line = [word for word in EVALUATIONS if not word.startswith(("model", "trainer.ema_decay"))]
    line += ["model._target_=tests.test_preemption.Counts", "dataset.in_channels=3"]
    assert command(*line, root=tmp_path / "runs", before=plant_stop(4, "val")).code == 75
    assert_same_bits(finished(*line, root=tmp_path / "runs"), once(*line))


@pytest.mark.slow
def test_a_run_that_begins_from_such_a_checkpoint_makes_the_evaluation(tmp_path: Path) -> None:
    line = [*EVALUATIONS, "trainer.max_epochs=2"]
    stopped = command(*EVALUATIONS, root=tmp_path / "first", before=plant_stop(7, "val"))
    longer = finished(*line, f"run.resume={stopped.directory}", root=tmp_path / "second")
    assert [row["step"] for row in longer.rows if row["split"] == "val"] == [4, 7, 8, 12, 14]
    assert [row["step"] for row in longer.rows if row["split"] == "test"] == [14]


@pytest.mark.slow
def test_between_rows_a_signal_is_heard_within_a_second(tmp_path: Path) -> None:
    """Rows every hundred steps, which take at least 20 ms: the ranks ask each other by the clock."""
    line = [*RUN, "trainer.max_epochs=null", "trainer.max_steps=9000", "trainer.log_every=100", "trainer.eval_every=null",
            "checkpoint.every=null", "parallel=ddp", "launch.nproc_per_node=2"]  # fmt: skip

    def look(trainer: Trainer, *_: Any, **__: Any) -> None:
        time.sleep(0.02)
        if trainer.progress.step == 110 and Environment.read().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    process = begin(*line, root=tmp_path / "runs", before=lambda: before_each(Trainer, "train_step", look))
    ended = end(process, root=tmp_path / "runs")
    assert ended.code == 75, ended.output
    assert 110 < ended.summary["step"] < 110 + 5 + 3


def members(group: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            pass
    return found


STOPS: list[tuple[str, list[str], tuple[str, str, int]]] = [
    *(("ddp 2", [], case) for case in CASES),
    *(("single", [], (moment, "rank 0", signum)) for moment, signum in zip(MOMENTS, SIGNALS)),
    ("ddp 2", ["checkpoint.async_save=true"], ("saving", "rank 1", signal.SIGUSR1)),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("strategy", "more", "case"), STOPS)
def test_a_signal_at_any_moment_stops_every_rank_and_the_same_command_continues(
    strategy: str, more: list[str], case: tuple[str, str, int], tmp_path: Path
) -> None:
    moment, victim, signum = case
    line, root, whole = [*LINE, *STRATEGIES[strategy], *more], tmp_path / "runs", once(*LINE, *STRATEGIES[strategy])
    process = begin(*line, root=root, before=lambda: plant(moment, victim, signum))
    stopped = end(process, root=root)
    assert stopped.code == 75, stopped.output
    assert members(process.pid) == [], "an orphan"
    summary = stopped.summary
    assert summary["status"] == "preempted"
    first = {"start-up": 1, "saving": 4}.get(moment, STEP)
    # several ranks agree a step later; on a loaded machine the thread that notes signals comes some steps later
    assert first <= summary["step"] <= first + 6
    committed = sorted(path.name for path in (stopped.directory / "checkpoints").iterdir())
    assert committed == [f"step_{step:08d}" for step in sorted({4, summary["step"]}) if step <= summary["step"]]
    left = read_state(stopped.directory / "checkpoints" / committed[-1])["evaluations_left"]
    expected = [row for row in exact_rows(whole) if row["step"] <= summary["step"]]
    expected = [row for row in expected if (row["step"], row["split"]) not in {(summary["step"], split) for split in left}]
    assert exact_rows(stopped) == expected, "what was measured until then is there, and nothing else"
    assert_same_bits(finished(*line, root=root), whole)


class Pooled:
    """A dataset whose samples are made by processes of its own: some in the constructor, as many public datasets scan files."""

    def __init__(self) -> None:
        with multiprocessing.Pool(2) as pool:
            self.table = pool.map(abs, range(-48, 0))
        self.pool = multiprocessing.Pool(1)

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((1, 4, 4), float(self.pool.apply(abs, (-self.table[index],)))), index % 2


POOLED = ["dataset=map_style", f"dataset.train._target_={__name__}.Pooled", "dataset.facts={num_classes: 2, in_channels: 1, image_size: 4}",
          "model=mlp", "model.dim=4", "global_batch_size=6", "trainer.max_steps=12", "trainer.max_epochs=null",
          "checkpoint.every=null", "precision=fp64"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "victim"), [("single", "rank 0"), pytest.param("ddp 2", "agent", marks=pytest.mark.slow)])
def test_processes_of_the_user_s_end_when_they_are_ended_and_not_when_the_run_is_stopped(
    strategy: str, victim: str, tmp_path: Path
) -> None:
    line, root = [*POOLED, *STRATEGIES[strategy]], tmp_path / "runs"
    before = lambda: plant("training", victim, signal.SIGTERM)  # noqa: E731
    stopped = command(*line, "rehearse=false", root=root, before=before)
    assert (stopped.code, stopped.summary["status"]) == (75, "preempted"), stopped.output
    assert STEP <= stopped.summary["step"] < 12
    assert_close(finished(*line, "rehearse=true", root=root), once(*POOLED, *STRATEGIES["single"]))


def test_a_signal_while_the_model_is_looked_at_ends_the_command_at_once(tmp_path: Path) -> None:
    began = tmp_path / "began"

    def look_slowly() -> None:
        def slow(*_: object, **__: object) -> tuple[list[object], list[object]]:
            began.touch()
            time.sleep(60)
            return [], []

        framework.preflight.dry_build.dry_build = slow

    process = begin(*RUN, root=tmp_path / "runs", before=look_slowly)
    wait_for(began.exists, what="the look at the model")
    since = time.monotonic()
    process.terminate()
    ended = end(process, root=tmp_path / "runs")
    assert ended.code == 75 and "stopped before the start" in ended.output and time.monotonic() - since < 5, ended.output
    assert not list(ended.root.glob("*/*"))


@pytest.mark.slow
def test_a_run_that_nohup_has_started_outlives_its_terminal(tmp_path: Path) -> None:
    def plant() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        once_at(*MOMENTS["training"], lambda: os.killpg(0, signal.SIGHUP))

    line = [*LINE, *STRATEGIES["ddp 2"]]
    assert_same_bits(finished(*line, root=tmp_path / "runs", before=plant), once(*LINE, *STRATEGIES["ddp 2"]))
