"""Workers of our own: they end with their parent, however it ends, and what a signal interrupts can be continued."""

import hashlib
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from framework.launch import claim
from framework.runtime.environment import Environment
from framework.training.loop import Trainer
from tests.harness import Ended, after_each, around, assert_same_bits, begin, command, end, once, wait_for
from tests.test_resume import RUN, STRATEGIES

TWO = [*RUN, *STRATEGIES["ddp 2"]]
STOP_AT = 6


def undisturbed() -> Ended:
    return once(*TWO)


class Halted:
    """A command whose ranks wait at the end of step STOP_AT (of their first attempt) until they are let go."""

    def __init__(self, *overrides: str, folder: Path, num_ranks: int, before: Callable[[], None] = lambda: None) -> None:
        self.before = before
        self.root = folder / "runs"
        self.go = folder / "go"
        self.marks = [folder / f"rank_{rank}" for rank in range(num_ranks)]
        self.process = begin(*overrides, root=self.root, before=self._plant)
        wait_for(lambda: all(mark.exists() for mark in self.marks), timeout_s=60, what="every rank at its halt")
        self.pids = [int(mark.read_text()) for mark in self.marks]

    def _plant(self) -> None:
        self.before()

        def halt(trainer: Trainer, *_: object, **__: object) -> None:
            mark = self.marks[Environment.read().rank]
            if trainer.progress.step == STOP_AT and not mark.exists():
                beside = mark.with_suffix(".part")
                beside.write_text(str(os.getpid()))
                beside.rename(mark)
                while not self.go.exists():
                    time.sleep(0.01)

        after_each(Trainer, "train_step", halt)

    def resume(self) -> None:
        self.go.touch()

    def end(self) -> Ended:
        return end(self.process, root=self.root)


def assert_gone(pids: list[int], *, timeout_s: float = 10.0) -> None:
    def gone() -> bool:
        return not any(is_alive(pid) for pid in pids)

    def is_alive(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # it may end while it is looked at
            return False

    wait_for(gone, timeout_s=timeout_s, what=f"the end of {pids}")


def test_after_kill_9_of_a_worker_the_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    notes = tmp_path / "notes"  # where torch notes an error of a worker
    notes.mkdir()

    def take_notes_there() -> None:
        tempfile.tempdir = None
        os.environ["TMPDIR"] = str(notes)

    run = Halted(*TWO, folder=tmp_path, num_ranks=2, before=take_notes_there)
    os.kill(run.pids[0], signal.SIGKILL)
    run.resume()
    ended = run.end()
    assert ended.code == 0, ended.output
    assert not list(notes.glob("**/pytorch-errorfile*")), "they are gone with the run"
    assert_same_bits(ended, undisturbed())
    assert ended.summary["restarts"] == 1
    assert_gone(run.pids)
    # the agent looks at one process that has ended; if that is the peer, the signal's name is lost, the rank is not
    told = r"rank 0 failed: killed(, without a message| by SIGKILL); restart 1 of 3\n"
    assert len(re.findall(told, ended.output)) == 1, ended.output
    assert len(re.findall(r"\[launcher\] WARNING " + told, (ended.directory / "train.log").read_text())) == 1


def test_kill_9_of_the_parent_leaves_no_orphan_and_the_same_command_continues(tmp_path: Path) -> None:
    run = Halted(*TWO, folder=tmp_path, num_ranks=2)
    os.kill(run.process.pid, signal.SIGKILL)
    assert leftovers(Ended(0, "", run.root))
    again = command(*TWO, root=run.root)  # at once: the lock is free as soon as the last worker is gone
    assert_gone(run.pids, timeout_s=1.0)
    assert again.code == 0, again.output
    assert_same_bits(again, undisturbed())
    assert not leftovers(again)


def leftovers(ended: Ended) -> list[Path]:
    """The launcher's temporary folders of this run."""
    key = hashlib.sha256(str(ended.directory.absolute()).encode()).hexdigest()[:16]
    return list(Path(tempfile.gettempdir()).glob(f"steadfast_{key}_*"))


def test_a_second_process_on_the_same_run_is_refused_at_once(tmp_path: Path) -> None:
    run = Halted(*TWO, folder=tmp_path, num_ranks=2)
    second = command(*TWO, root=run.root, timeout_s=20)
    # the harness writes both outputs to one file; the second truncated it
    assert second.code == 1
    assert f"is in use by process {run.process.pid} on {socket.gethostname()}" in second.output
    run.resume()
    assert run.end().code == 0


def test_workers_refuse_a_configuration_that_changed_under_them(tmp_path: Path) -> None:
    def freeze_then_edit(freeze: Any, config: dict, directory: Path, **options: str) -> object:
        frozen = freeze(config, directory, **options)
        frozen.path.write_text(frozen.path.read_text().replace("seed: 0", "seed: 1"))
        return frozen

    plant = lambda: around(claim, "freeze", freeze_then_edit)  # noqa: E731
    failed = command(*TWO, "launch.max_restarts=0", root=tmp_path / "runs", before=plant)
    assert failed.code == 1
    assert "has changed since this run was started" in failed.output
