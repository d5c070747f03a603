"""Every point of one save at which a rank can be killed: around and inside each write, flush, rename and removal."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from framework.checkpoint import format
from framework.checkpoint.store import CheckpointStore
from framework.runtime.environment import Environment
from tests.harness import assert_same_bits, command, finished, once
from tests.test_resume import RUN, STRATEGIES, crash, preempted
from tests.torture.test_retention import valid_steps

LINE = [*RUN, *STRATEGIES["fsdp 2"], "trainer.max_epochs=null", "trainer.max_steps=9", "checkpoint.every=4",
        "checkpoint.keep_last=1", "launch.max_restarts=0"]  # fmt: skip
AT_STEP = 8  # the save that is interrupted; it deletes that of step 4


class Points:
    """Counts the points of the save on one rank; kills everyone at the one with number `strike_at`."""

    def __init__(self, *, rank: int, strike_at: int | None, record: Path) -> None:
        self.rank = rank
        self.strike_at = strike_at
        self.record = record
        self.names: list[str] = []
        self._saving: int | None = None  # the thread

    def pass_by(self, name: str) -> None:
        if self._saving != threading.get_ident():
            return
        self.names.append(name)
        if len(self.names) == self.strike_at:
            self.record.write_text(name)
            crash()

    def plant(self) -> None:
        for owner, name in [(os, "mkdir"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "fsync")]:
            setattr(owner, name, self._around(name, getattr(owner, name)))
        self._around_the_writes()
        save = CheckpointStore.save

        def watched(store: CheckpointStore, step: int, *args: Any) -> None:
            if step != AT_STEP or Environment.read().rank != self.rank:
                save(store, step, *args)
                return
            self._saving = threading.get_ident()
            save(store, step, *args)
            self._saving = None
            if self.strike_at is None:
                self.record.write_text("\n".join(self.names))

        CheckpointStore.save = watched

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.pass_by(f"before {name}")
            result = original(*args, **kwargs)
            self.pass_by(f"after {name}")
            return result

        return call

    def _around_the_writes(self) -> None:
        write, write_text = os.write, Path.write_text
        points = self

        def in_halves(descriptor: int, content: memoryview) -> int:
            points.pass_by("before write")
            write(descriptor, content[: len(content) // 2])
            points.pass_by("half of write")
            written = write(descriptor, content[len(content) // 2 :])
            points.pass_by("after write")
            return len(content) // 2 + written

        def written(self: Path, text: str) -> None:
            points.pass_by("before write_text")
            write_text(self, text[: len(text) // 2])
            points.pass_by("half of write_text")
            write_text(self, text)
            points.pass_by("after write_text")

        format.os = SimpleNamespace(**vars(os) | {"write": in_halves})
        Path.write_text = written


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode", ["checkpoint.async_save=false", "checkpoint.async_save=true"])
def test_killed_at_every_point_of_a_save(mode: str, rank: int, tmp_path: Path) -> None:
    line = [*LINE, mode]
    begun = preempted(*line, at=4, root=tmp_path / "begun")
    record = tmp_path / "points"
    shutil.copytree(begun.root, tmp_path / "counted")
    finished(*line, root=tmp_path / "counted", before=Points(rank=rank, strike_at=None, record=record).plant)
    names = record.read_text().splitlines()
    print(f"{len(names)} points on rank {rank}: {names}")
    kinds = {name.split()[-1] for name in names}
    assert kinds >= ({"write", "fsync", "rename", "unlink", "mkdir", "write_text"} if rank == 0 else {"write", "fsync"})
    of_this = 1 if mode.endswith("true") else 2  # the points of a mode in turn with the other's
    for number, name in list(enumerate(names, start=1))[2 - of_this :: 2]:
        root = tmp_path / f"killed_{number}"
        shutil.copytree(begun.root, root)
        points = Points(rank=rank, strike_at=number, record=tmp_path / "struck")
        killed = command(*line, root=root, before=points.plant)
        assert killed.code == -signal.SIGKILL and (tmp_path / "struck").read_text() == name, (name, killed.output)
        assert valid_steps(killed.directory / "checkpoints"), f"none is left at point {number}, {name}"
        assert_same_bits(finished(*line, root=root), once(*LINE))
        shutil.rmtree(root)
