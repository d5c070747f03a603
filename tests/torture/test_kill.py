"""Hundreds of kill -9, each followed by the same command: the run ends with the bits it would have had."""

import gc
import itertools
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint.store import CheckpointStore
from framework.runtime.environment import Environment
from framework.training.loop import Trainer
from tests.harness import after_each, around, assert_same_bits, before_each, command, exact_rows, finished
from tests.test_any_to_any import RUN as FROZEN_GPT
from tests.test_any_to_any import STRATEGIES as STRATEGIES_OF_ALL
from tests.test_any_to_any import line as line_of
from tests.test_bitwise import digest
from tests.test_conformance import NOT_EQUAL
from tests.test_resume import RUN, STRATEGIES

NUM_KILLS = 20
NUM_KILLS_ACROSS = 50
LONG = [*RUN, "trainer.max_epochs=32", "trainer.eval_every=9", "checkpoint.every=3"]  # 224 steps, more than the kills let pass


@dataclass(frozen=True)
class Kill:
    victims: str  # "worker", "all workers" or "parent"
    rank: int
    in_save: bool
    after: int  # steps of this attempt; in a save, calls that touch the disk

    @classmethod
    def draw(cls, rng: random.Random, *, number: int, num_ranks: int) -> "Kill":
        in_save = number % 4 == 0
        return cls(
            victims=rng.choice(["worker", "all workers", "parent"]) if num_ranks > 1 else "parent",
            rank=rng.randrange(num_ranks),
            in_save=in_save,
            after=rng.randrange(14) if in_save else rng.randrange(1, 8),
        )

    def plant(self) -> None:
        gc.disable()  # in a child of a large process it takes more time than all else
        self._plant_in_save() if self.in_save else self._plant_after_steps()

    def _strike(self) -> None:
        num_ranks = Environment.read().world_size
        if self.victims == "all workers" and num_ranks > 1:
            siblings = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
            for pid in siblings:
                if int(pid) != os.getpid():
                    os.kill(int(pid), signal.SIGKILL)
        if self.victims == "parent" and num_ranks > 1:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _plant_after_steps(self) -> None:
        done = itertools.count(1)

        def count(*_: Any, **__: Any) -> None:
            if next(done) == self.after and Environment.read().rank == self.rank:
                self._strike()

        after_each(Trainer, "train_step", count)

    def _plant_in_save(self) -> None:
        """Strike at the n-th call inside the attempt's saves that reads, flushes, renames or deletes a file."""
        calls, is_saving = itertools.count(), [False]

        def count(*_: Any, **__: Any) -> None:
            if is_saving[0] and Environment.read().rank == self.rank and next(calls) == self.after:
                self._strike()

        def watched(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            is_saving[0] = True
            try:
                return save(*args, **kwargs)
            finally:
                is_saving[0] = False

        around(CheckpointStore, "save", watched)
        for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (shutil, "rmtree")):
            before_each(module, name, count)


def drawn() -> random.Random:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")  # shown if the test fails: put it above to repeat
    return random.Random(seed)


def is_killed(*line: str, number: int, num_ranks: int, rng: random.Random, root: Path) -> bool:
    """Give a command that is killed; or it was over before."""
    kill = Kill.draw(rng, number=number, num_ranks=num_ranks)
    ended = command(*line, root=root, before=kill.plant)
    assert ended.code in (0, 1, -signal.SIGKILL), f"{kill}\n{ended.output}"
    return ended.code != 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["single", "ddp 2", "fsdp 2"])
def test_twenty_kills_change_no_bit(strategy: str, tmp_path: Path) -> None:
    rng = drawn()
    line = [*LONG, *STRATEGIES[strategy], "launch.max_restarts=0"]
    num_ranks = 1 if strategy == "single" else 2
    whole = finished(*line, root=tmp_path / "whole")
    for number in range(NUM_KILLS):
        assert is_killed(*line, number=number, num_ranks=num_ranks, rng=rng, root=tmp_path / "killed"), number
    ended = finished(*line, root=tmp_path / "killed")
    assert_same_bits(ended, whole)
    assert ended.summary["restarts"] >= 1


EVERY = [*FROZEN_GPT, "trainer.max_steps=150", "trainer.eval_every=9", "checkpoint.every=3", "checkpoint.async_save=true",
         "logger=tensorboard", "launch.max_restarts=0"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1500)  # four ranks beside three other tests, on two cores
@pytest.mark.parametrize("strategy", [*STRATEGIES_OF_ALL, *NOT_EQUAL])
def test_twenty_kills_under_every_strategy_change_no_bit(strategy: str, tmp_path: Path) -> None:
    """With saves beside the steps, an average of the weights, frozen and tied ones, and a logger."""
    rng = drawn()
    how = [*line_of(strategy), *(["parallel.sync_every=3"] if strategy in NOT_EQUAL else [])]
    num_ranks = int(how[1].partition("=")[2])
    whole = finished(*EVERY, *how, root=tmp_path / "whole", timeout_s=600)
    num_struck = 0
    for number in range(NUM_KILLS):
        num_struck += is_killed(*EVERY, *how, number=number, num_ranks=num_ranks, rng=rng, root=tmp_path / "killed")
    ended = finished(*EVERY, *how, root=tmp_path / "killed", timeout_s=600)
    assert num_struck >= NUM_KILLS // 4 and ended.summary["restarts"] >= num_struck // 2  # some strike before the first record
    assert_same_bits(ended, whole)


BITWISE = [*LONG, "parallel=ddp", "invariance=bitwise", "micro_batch_size=4"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills_and_any_number_of_processes_change_no_bit(tmp_path: Path) -> None:
    """Each attempt has one to four processes, and writes its checkpoints beside the steps or between them."""
    rng = drawn()
    line = [*BITWISE, "trainer.max_epochs=80", "trainer.eval_every=40", "checkpoint.every=2", "launch.max_restarts=0"]
    whole = finished(*line, root=tmp_path / "whole", timeout_s=900)
    num_struck = 0
    for number in range(NUM_KILLS_ACROSS):
        num_ranks = rng.randrange(1, 5)
        how = [f"launch.nproc_per_node={num_ranks}", f"checkpoint.async_save={rng.choice(['true', 'false'])}"]
        num_struck += is_killed(*line, *how, number=number, num_ranks=num_ranks, rng=rng, root=tmp_path / "killed")
    ended = finished(*line, root=tmp_path / "killed", timeout_s=900)
    print(f"{num_struck} kills")
    assert num_struck == NUM_KILLS_ACROSS, "it was finished before all of them"
    assert digest(ended) == digest(whole)
    assert exact_rows(ended) == exact_rows(whole)
