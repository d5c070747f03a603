"""Ctrl-C, as a terminal sends it: once, and the run stops with a checkpoint; twice, and it is gone at once."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.runtime.environment import Environment
from framework.sweep.sweep import sweep
from tests.harness import assert_same_bits, begin, end, finished, once, wait_for
from tests.test_malformed import REPOSITORY
from tests.test_preemption import LINE, MOMENTS, STEP, members, once_at
from tests.test_resume import STRATEGIES

SAID = "SIGINT: stopping after this step; Ctrl-C again stops at once\n"
WAYS = {
    "alone": [],
    "two ranks": STRATEGIES["ddp 2"],
    "sweep": ["seed=0,1"],
    "two jobs": ["seed=0,1", "hydra.launcher.n_jobs=2"],
}


def wait_in_c(milliseconds: int) -> None:
    """Be in one call into C, as a long backward pass is: Python's signal handlers wait for its end."""
    libc = ctypes.CDLL(None)
    mutex, until = ctypes.create_string_buffer(64), (ctypes.c_long * 2)()
    libc.clock_gettime(0, until)
    until[0] += milliseconds // 1000
    until[1] = 0
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, until)  # one's own: it waits to the end of its time


def held(moment: str, mark: Path, *, seconds: int) -> Callable[[], None]:
    """Have the process that comes first to a moment stay there, in a call into C, having left a mark."""

    def hold() -> None:
        if Environment.read().rank == 0 and not mark.exists():
            mark.touch()
            wait_in_c(1000 * seconds)

    return lambda: once_at(*MOMENTS[moment], hold)


def begin_held(way: str, moment: str, *, seconds: int, root: Path) -> tuple[subprocess.Popen[str], Path]:
    mark, output = root.parent / "here", root.parent / f"{root.name}.output"
    run = {"run": lambda overrides: sweep(overrides, [])} if "seed=0,1" in WAYS[way] else {}
    process = begin(*LINE, *WAYS[way], root=root, before=held(moment, mark, seconds=seconds), **run)
    wait_for(mark.exists, what=f"the run in {moment}")
    return process, output


CASES = [("alone", moment) for moment in MOMENTS if moment != "accumulation"]
CASES += [("two ranks", "training"), ("two ranks", "saving"), ("sweep", "training"), ("two jobs", "training")]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "moment"), CASES)
def test_twice_nothing_is_left_of_it_but_a_valid_checkpoint(way: str, moment: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    process, output = begin_held(way, moment, seconds=120, root=root)
    os.killpg(process.pid, signal.SIGINT)
    wait_for(lambda: SAID in output.read_text(), what="the line that says so")
    assert output.read_text().count("SIGINT") == 1, "one line, whatever the number of processes"
    again = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    stopped = end(process, root=root)
    assert stopped.code == 130, stopped.output
    wait_for(lambda: not members(process.pid), what="no process is left", timeout_s=2.0)
    assert time.monotonic() - again < 2.0
    if way == "alone":
        assert_same_bits(finished(*LINE, root=root), once(*LINE, "seed=0"))


@pytest.mark.quick(1)
@pytest.mark.parametrize("moment", ["training", "evaluation"])
def test_once_it_is_said_at_once_and_a_checkpoint_is_committed(moment: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    process, output = begin_held("alone", moment, seconds=4, root=root)
    os.killpg(process.pid, signal.SIGINT)
    begun = time.monotonic()
    wait_for(lambda: SAID in output.read_text(), what="the line that says so")
    assert time.monotonic() - begun < 2.0, "while the step goes on"
    stopped = end(process, root=root)
    assert stopped.code == 75
    told = f"stopped after step {STEP}; the same command continues from the checkpoint of step {STEP}"
    assert stopped.output.splitlines()[-1] == told
    assert_same_bits(finished(*LINE, root=root), once(*LINE, "seed=0"))


def test_after_a_run_signals_are_heard_as_before(tmp_path: Path) -> None:
    """A process may have several runs: what listens during one is gone with it."""

    def two(overrides: list[str]) -> int:
        from framework.cli.run import start

        num_threads, num_files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        code = start(overrides)
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= num_files, what="no pipe is left")
        wait_for(lambda: len(os.listdir("/proc/self/task")) <= num_threads, what="no thread is left")
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return code

    process = begin(*LINE, "trainer.max_steps=2", root=tmp_path / "runs", run=two)
    assert end(process, root=tmp_path / "runs").code == 130


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-m", "seed=1,2"]], ids=" ".join)
def test_before_anything_has_begun_it_leaves_without_a_word(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("import pathlib, time\npathlib.Path('here').touch()\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, str(REPOSITORY / "train.py"), *arguments], cwd=tmp_path, text=True,
                               env=os.environ | {"PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    wait_for((tmp_path / "here").exists, what="its imports")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert (process.returncode, output) == (-signal.SIGINT, "")
