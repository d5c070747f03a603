"""A forked process of a process that has computed on several threads: it computes; one that waits is found with its place."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import framework.launch.worker
from framework.preflight import child
from framework.preflight.child import in_child
from framework.runtime.files import own_file_positions
from framework.runtime.forks import busy_s
from framework.runtime.preemption import PREEMPTION
from tests.harness import command

_FORK = multiprocessing.get_context("fork")


def after_computing(act: Callable[[], object]) -> object:
    """Return the result of `act` in a process that has computed on two threads before."""

    def run() -> None:
        torch.set_num_threads(2)
        torch.rand(1000, 1000).exp().sum()
        theirs.send(act())

    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=run)
    process.start()
    assert ours.poll(60), "it waits for threads that the fork has not copied"
    answer = ours.recv()
    process.join()
    return answer


def compute() -> float:
    torch.set_num_threads(2)
    return float(torch.ones(1000, 1000).exp().log().sum())


def test_a_child_of_a_process_that_has_computed_can_compute_on_all_cores() -> None:
    assert after_computing(lambda: in_child(compute, limit_s=30.0)) == pytest.approx(1e6)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def test_a_child_that_waits_forever_is_ended_with_the_place_where_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child, "_SILENT_S", 0.5)
    monkeypatch.setattr(child, "_HANGS_S", 1.0)
    began = time.monotonic()
    failure = in_child(wait_for_a_lock)
    assert time.monotonic() - began < 30
    assert failure is not None and failure.hangs and not failure.is_unfinished
    assert "the check of this run has done nothing for" in caplog.text and f": it waits at {__file__}:" in caplog.text
    assert failure.what.startswith(f"it waits forever at {__file__}:") and failure.what.endswith("in wait_for_a_lock")


def raise_error(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(("error", "is_unfinished"), [(KeyError("x"), False), (MemoryError("no memory"), True)])
def test_only_a_lack_of_time_or_memory_leaves_a_child_s_work_unfinished(error: Exception, is_unfinished: bool) -> None:
    failure = in_child(lambda: raise_error(error))
    assert failure is not None and failure.is_unfinished is is_unfinished
    assert failure.what.startswith(f"{type(error).__name__}: ") and f"at {__file__}:" in failure.what
    late = in_child(lambda: time.sleep(60), limit_s=0.2)
    assert late is not None and late.is_unfinished and late.what.startswith(f"it took more than 0 s, and is at {__file__}:")


def test_a_child_moves_no_place_in_its_parent_s_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    with open(tmp_path / "file", "rb", buffering=0) as file:
        file.seek(10)

        def read() -> None:
            own_file_positions()
            assert (file.tell(), file.read(5)) == (10, bytes(range(10, 15)))

        process = _FORK.Process(target=read)
        process.start()
        process.join()
        assert process.exitcode == 0 and file.tell() == 10


def use_a_pool(is_heard_at_once: bool) -> tuple[list[int], bool]:
    PREEMPTION.watch()
    with PREEMPTION.heard_at_once() if is_heard_at_once else nullcontext():
        for _ in range(20):  # a signal at any moment after the fork
            process = _FORK.Process(target=time.sleep, args=(600,))
            process.start()
            process.terminate()
            process.join()
        with multiprocessing.Pool(2) as pool:
            found = pool.map(abs, [-1, -2])
        time.sleep(0.1)  # a thread would note it
    return found, PREEMPTION.requested


@pytest.mark.slow
@pytest.mark.parametrize("is_heard_at_once", [False, True])
def test_a_pool_of_the_user_s_ends_its_processes_and_stops_no_run(is_heard_at_once: bool) -> None:
    assert in_child(lambda: use_a_pool(is_heard_at_once), limit_s=30.0) == ([1, 2], False)


def test_who_polls_is_not_busy_and_who_computes_is_however_little_of_a_cpu_they_get() -> None:
    alone, loaded, starved = (0.04, 0.0), (0.008, 0.8), (0.01, 0.99)  # of a second: on a CPU, and waiting for one
    assert [busy_s({}, {1: use}, elapsed_s=1.0) for use in (alone, loaded)] == pytest.approx([0.04, 0.04])
    assert busy_s({}, {1: starved}, elapsed_s=1.0) == pytest.approx(1.0)
    assert busy_s({1: (5.0, 2.0)}, {1: (5.0, 2.0), 2: (0.5, 0.0)}, elapsed_s=1.0) == pytest.approx(0.5)
    assert busy_s({1: (5.0, 2.0)}, {}, elapsed_s=1.0) == 5.0  # it has ended


@pytest.mark.parametrize(("line", "most"), [([], 3), (["parallel=ddp", "launch.nproc_per_node=2"], 7)])
def test_a_command_forks_few_processes_before_its_first_worker(line: list[str], most: int, tmp_path: Path) -> None:
    def note(event: str, _: object) -> None:
        if event == "os.fork":
            with open(tmp_path / "forks", "a") as file:
                file.write("one\n")

    def count() -> None:
        sys.addaudithook(note)
        framework.launch.worker.start_workers = lambda run: os._exit(0)

    ended = command(*line, "rehearse=true", root=tmp_path / "runs", before=count)
    assert ended.code == 0, ended.output
    assert len((tmp_path / "forks").read_text().splitlines()) <= most
