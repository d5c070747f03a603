"""Machines as they are: clocks that jump, processes that are suspended, too little memory, few open files, odd paths, others' files."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from framework.runtime.environment import Environment
from tests.harness import Ended, assert_same_bits, begin, end, finished, once, typed, wait_for
from tests.launch.paced import ROOT
from tests.test_resume import RUN, after_step

TWO = [*RUN, "parallel=ddp", "launch.nproc_per_node=2"]
LONG = [*TWO, "trainer.max_epochs=40", "checkpoint.every=20", "trainer.log_every=5", "launch.timeout_s=8"]


def step_of(root: Path) -> int:
    rows = [path.read_text().count('"split": "train"') for path in root.glob("*/*/metrics.jsonl")]
    return 5 * sum(rows)


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    """Two hours back, then a day ahead: the run goes on, a second command knows that it does, and its times are no nonsense."""
    library, offset = tmp_path / "clock_offset.so", tmp_path / "offset"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, ROOT / "tests/torture/clock_offset.c", "-ldl"], check=True)
    offset.write_text("0")
    environment = os.environ | {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}
    line = [*LONG, f"run.root={tmp_path / 'runs'}"]
    slow = tmp_path / "slow"
    slow.write_text("0.1")
    paced = [sys.executable, "tests/launch/paced.py", str(tmp_path), *line]
    running = subprocess.Popen(paced, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for steps, seconds in ((5, -7200), (15, 86400)):
        wait_for(lambda steps=steps: step_of(tmp_path / "runs") > steps, what="some steps")
        offset.write_text(str(seconds))
        again = [sys.executable, "train.py", *line]
        second = subprocess.run(again, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE)
        assert second.returncode == 1 and "is in use by process" in second.stderr
    slow.unlink()
    output, _ = running.communicate(timeout=120)
    ended = Ended(running.returncode, output, tmp_path / "runs")
    assert ended.code == 0, output
    assert_same_bits(ended, once(*LONG))
    assert 0 < ended.summary["wall_s"] < 600 and all(row.get("step_s", 1) > 0 for row in ended.rows)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_is_suspended_for_longer_than_its_time_out_goes_on(num_ranks: int, tmp_path: Path) -> None:
    """A laptop's lid, `docker pause`, Slurm's suspend: on waking up, the collectives' time is over, and nobody hangs."""
    line = [*LONG, f"launch.nproc_per_node={num_ranks}"]
    running = begin(*line, root=tmp_path)
    wait_for(lambda: step_of(tmp_path) > 60, what="some steps")
    stopped = family(running.pid)
    for process in stopped:
        process.suspend()
    time.sleep(14)  # longer than launch.timeout_s
    for process in stopped:
        process.resume()
    ended = end(running, root=tmp_path)
    assert ended.code == 0, ended.output
    if num_ranks == 2:
        assert_same_bits(ended, once(*LONG))
    assert "hangs" not in ended.output


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A group of processes that may use 900 MB together."""
    first = Path("/sys/fs/cgroup")
    is_second = (first / "cgroup.controllers").exists()
    folder = (first if is_second else first / "memory") / f"steadfast_{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if is_second else "memory.limit_in_bytes")).write_text(str(900 << 20))
    except OSError as error:
        pytest.skip(f"no group of processes can be made here: {error}")
    yield folder
    wait_for(lambda: not (folder / "cgroup.procs").read_text(), what="an empty group")
    folder.rmdir()


@pytest.mark.slow
def test_the_kernel_that_kills_a_rank_for_memory_costs_a_restart(cgroup: Path, tmp_path: Path) -> None:
    """One rank needs more than its group has, once."""
    told = tmp_path / "told"

    def grow() -> None:
        if Environment.read().rank == 1 and not told.exists():
            told.touch()
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))
            hoard = [bytearray(os.urandom(1 << 20)) * 16 for _ in range(200)]
            raise AssertionError(f"{len(hoard)} blocks of 16 MB were to be had")

    ended = finished(*LONG, root=tmp_path, before=after_step(50, grow))
    assert "rank 1 failed: killed by SIGKILL; restart 1 of 3" in ended.output, ended.output
    counts = [path.read_text() for name in ("memory.events", "memory.oom_control") if (path := cgroup / name).exists()]
    assert "oom_kill 1\n" in counts[0], "it was the kernel"
    assert ended.summary["restarts"] == 1
    assert_same_bits(ended, once(*LONG))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ünï 日本", "a=b,c", "it's {x} ${y}", "100%", "-m", "two\nlines"])
def test_a_directory_may_have_any_name(name: str, tmp_path: Path) -> None:
    """Here the working directory: on the command line it would have to be quoted for Hydra."""
    place = tmp_path / name
    place.mkdir()
    for _ in range(2):
        told = typed(*TWO, "trainer.max_steps=3", "logger=tensorboard", directory=place)
        assert told.code == 0, told.output
    assert "finished already" in told.output
    (run,) = place.glob("runs/*/*/summary.json")
    evaluated = typed("mode=eval", f"run.dir=runs/default/{run.parent.name}", directory=place)
    assert evaluated.code == 0, evaluated.output
