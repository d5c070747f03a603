"""A kill -9 at any request to the store, and a directory that is lost half of the times: no bit changes, no checkpoint is lost."""

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import framework.launch.mirrored
from framework.checkpoint.manifest import directory_name
from framework.runtime.objects import Objects
from framework.training.loop import Trainer
from tests.harness import around, assert_same_bits, before_each, command, finished
from tests.test_mirror import steps
from tests.torture.test_kill import LONG, drawn

NUM_KILLS = 20
REQUESTS = ("listing", "read", "write", "create", "put", "get", "remove")


def strike_at(request: int, *, is_done: bool) -> Callable[[], None]:
    """Return what kills the whole command at this request, done or not."""

    def plant() -> None:
        framework.launch.mirrored._POLL_S = 0.02
        calls, command_pid = itertools.count(1), os.getpid()

        def count(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if next(calls) >= request:
                if is_done:
                    function(*args, **kwargs)
                os.kill(command_pid, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        before_each(Trainer, "train_step", lambda *_, **__: time.sleep(0.02))
        for name in REQUESTS:
            around(Objects, name, count)

    return plant


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_at_any_request_change_no_bit(store: str, tmp_path: Path) -> None:
    rng = drawn()
    line = [*LONG, f"run.mirror={store}"]
    whole = finished(*LONG, root=tmp_path / "whole")
    newest = 0
    for _ in range(NUM_KILLS):
        killed = command(*line, root=tmp_path / "runs", before=strike_at(rng.randrange(1, 80), is_done=rng.random() < 0.5))
        if killed.code == 0:
            assert "finished" in killed.output  # with fewer requests
            break
        assert killed.code == -signal.SIGKILL, killed.output
        if any("/checkpoints/" in name for name in Objects(store).listing()):
            there = steps(store)
            assert not newest or (there and there[0] >= newest), (there, newest)
            newest = there[0] if there else 0
        if rng.random() < 0.5:
            shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    ended = finished(*line, root=tmp_path / "runs")
    assert_same_bits(ended, whole)
    assert newest > 0, "the store has been of use"
    again = finished(*line, root=tmp_path / "runs")  # puts, and prunes, what a kill at the end has left
    here = sorted(path.name for path in (again.directory / "checkpoints").iterdir())
    there = [directory_name(step) for step in reversed(steps(store))]
    assert there == here, (here, there, ended.output, again.output)
    assert max(path.name for path in (whole.directory / "checkpoints").iterdir()) in here
    shutil.rmtree(tmp_path / "runs")
    assert_same_bits(finished(*line, root=tmp_path / "runs"), whole)
