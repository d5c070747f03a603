"""Two commands, one directory: the second is refused, whatever the file system thinks of locks."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.runtime.lock import Claim, Lock, RunLocked, Taken
from tests.harness import Ended, assert_same_bits, before_each, begin, command, finished, wait_for_checkpoint
from tests.hosts import mount_remote, needs_fuse, own_mounts
from tests.launch.paced import pace

RUN = ["dataset=synthetic", "dataset.num_train=64", "dataset.image_size=8", "model=cnn", "model.channels=[4,8]",
       "global_batch_size=16", "trainer.max_steps=40", "trainer.max_epochs=null", "trainer.log_every=1", "checkpoint.every=4",
       "run.dir=${run.root}/shared/it"]  # fmt: skip


def remote(folder: Path, cached_s: int, then: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Be on another machine: see `folder` over a network, with locks of this machine's own."""

    def enter() -> None:
        own_mounts()
        mount_remote(folder, cached_s=cached_s)
        then()

    return enter


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "runs" / "shared").mkdir(parents=True)
    (tmp_path / "slow").touch()
    return tmp_path / "runs" / "shared"


def seconds_of(act: Callable[[], None]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def refused_within(lock: Lock, within_s: float) -> None:
    def take() -> None:
        with pytest.raises(RunLocked, match=f"is in use by process {os.getpid()} on "):
            lock.take()

    assert seconds_of(take) < within_s


def test_a_lock_that_a_living_process_has_is_refused_at_once_and_a_released_one_is_free(tmp_path: Path) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.take()
    refused_within(second, 0.5)
    assert first.is_held and second.is_held
    first.release()
    assert not second.is_held
    assert seconds_of(second.take) < 0.5
    with pytest.raises(Taken, match="has been taken by process"):
        Claim(tmp_path, first.token).require()
    Claim(tmp_path, second.token).require()
    second.release()


def test_a_lock_is_released_although_its_disk_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, asked, answered = Lock(tmp_path), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        asked.set()
        answered.wait(60.0)

    monkeypatch.setattr(Lock, "_renew", wait)
    lock.take()
    assert asked.wait(30.0)
    assert seconds_of(lock.release) < 30 and not answered.is_set()
    assert not lock.is_held
    answered.set()


def test_where_the_kernels_lock_holds_nothing_a_holder_that_renews_its_token_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_lock(path: Path, *, waits: bool) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT)

    monkeypatch.setattr("framework.runtime.lock.lock_file", no_lock)
    first = Lock(tmp_path)
    first.take()
    refused_within(Lock(tmp_path), 3.0)
    first.release()


@pytest.mark.quick(1)
@pytest.mark.parametrize("change", [{}, {"boot": "another"}, {"container": "pid:[1]"}])
def test_a_holder_that_may_live_elsewhere_is_watched_before_it_is_taken_for_dead(
    change: dict[str, str], tmp_path: Path
) -> None:
    first = Lock(tmp_path)
    first.take()
    holder = first.holder()
    first.release()
    first.path.write_text(json.dumps(holder | change | {"pid": 2**22 + 1}))  # killed, without a message
    took = seconds_of(Lock(tmp_path).take)
    assert took < 0.5 if not change else 3.0 < took < 7.0


@needs_fuse
@pytest.mark.slow
@pytest.mark.parametrize("cached_s", [3, 0])
def test_the_second_command_is_refused_where_locks_stay_on_each_machine(cached_s: int, shared: Path, tmp_path: Path) -> None:
    alone = finished(*RUN, root=tmp_path / "alone")
    first = begin(*RUN, root=tmp_path / "runs", before=remote(shared, cached_s, pace(tmp_path)))
    wait_for_checkpoint(tmp_path / "runs")
    began = time.monotonic()
    second = command(*RUN, root=tmp_path / "runs", before=remote(shared, cached_s))
    took = time.monotonic() - began
    assert second.code == 1 and f"is in use by process {first.pid} on " in second.output, second.output
    assert took < 5.0  # of them 3 for the lock at most, and the check of the configuration
    (tmp_path / "slow").unlink()
    first.join(60)
    ended = Ended(first.exitcode, "", tmp_path / "runs")
    assert ended.code == 0
    assert_same_bits(ended, alone)


def contents(directory: Path) -> dict[Path, bytes]:
    """Return a run's files but the log, to which a line may be added."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "train.log"}


@needs_fuse
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["saving", "training"])
def test_a_command_that_was_frozen_stops_where_another_has_gone_on(moment: str, shared: Path, tmp_path: Path) -> None:
    def freeze_in_a_save() -> None:
        from framework.checkpoint.store import CheckpointStore

        def freeze(store: CheckpointStore, staging: Path, tensors: object) -> None:
            if staging.name.endswith("8"):
                os.kill(os.getpid(), signal.SIGSTOP)

        before_each(CheckpointStore, "_write", freeze)

    alone = finished(*RUN, root=tmp_path / "alone")
    then = pace(tmp_path) if moment == "training" else freeze_in_a_save
    first = begin(*RUN, root=tmp_path / "runs", before=remote(shared, 0, then))
    wait_for_checkpoint(tmp_path / "runs")
    if moment == "training":
        os.kill(first.pid, signal.SIGSTOP)
    os.waitpid(first.pid, os.WUNTRACED)
    (tmp_path / "slow").unlink()
    second = finished(*RUN, root=tmp_path / "runs", before=remote(shared, 0))
    assert_same_bits(second, alone)
    before = contents(second.directory)
    os.kill(first.pid, signal.SIGCONT)
    _, status = os.waitpid(first.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert contents(second.directory) == before
