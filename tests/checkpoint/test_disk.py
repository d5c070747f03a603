"""A real disk that is full, read-only or slow: every rank does the same, and what was committed stays valid."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.checkpoint import manifest
from framework.runtime.environment import Environment
from tests.harness import assert_same_bits, before_each, command, finished, once
from tests.test_resume import RUN, STRATEGIES, after_step

# 8 steps, a checkpoint of about 1 MiB after every second
LINE = [*RUN, "model.channels=[64,128]", "trainer.max_epochs=null", "trainer.max_steps=8", "checkpoint.every=2",
        "trainer.ema_decay=null", "checkpoint.max_failures=1"]  # fmt: skip
NUM_SIZES = 20
MODES = ["checkpoint.async_save=false", "checkpoint.async_save=true"]
MIB = 1 << 20


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, in memory, of 64 MiB until it is given another size."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small tmpfs needs root (as in `sudo pytest`, or a container)")
    yield path
    subprocess.run(["umount", "--recursive", str(path)], check=True)


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*"))


def checkpoints(directory: Path) -> list[Path]:
    """Return a run's checkpoints, having verified every file of each."""
    found = sorted(directory.glob("checkpoints/*"))
    for path in found:
        for name, entry in manifest.read_manifest(path).items():
            manifest.verify_file(path / name, entry)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted(range(NUM_SIZES), key=lambda number: number != 9))
def test_a_full_disk_loses_nothing(number: int, disk: Path) -> None:
    """The disk's size goes from nothing to two checkpoints and a half; later it is given room."""
    strategy = ["single", "ddp 2", "fsdp 2"][number % 3]
    mode = f"checkpoint.async_save={'true' if number % 2 else 'false'}"
    line = [*LINE, *STRATEGIES[strategy], mode]
    one = size_of(once(*LINE, *STRATEGIES[strategy]).directory / "checkpoints" / "step_00000008")
    room = 1.1 * MIB + 2.5 * one * number / NUM_SIZES  # less than 1 MiB is refused by the preflight
    mount("-o", f"remount,size={int(room) // 4096 * 4096}", str(disk))
    failed = command(*line, root=disk / "runs")
    assert failed.code == 74, f"{room / one:.2f} checkpoints\n{failed.output}"
    assert "Traceback" not in failed.output and "restart" not in failed.output
    num_committed = failed.output.count("training continues")
    kept = checkpoints(failed.directory)
    # the first save or the second fails, and then one more in a row: what was committed before is there
    assert len(kept) == min(2, failed.summary.get("saves", {"committed": len(kept)})["committed"]), failed.output
    assert num_committed == 1
    if room > 1.2 * MIB + one:
        assert kept, "there was room for one"
    mount("-o", "remount,size=64m", str(disk))
    assert_same_bits(finished(*line, root=disk / "runs"), once(*LINE, *STRATEGIES[strategy]))


def test_a_disk_of_no_room_at_all_is_refused(disk: Path) -> None:
    mount("-o", "remount,size=512k", str(disk))
    refused = command(*LINE, root=disk / "runs")
    assert refused.code == 74
    assert "the run's directory cannot be written: [Errno 28] No space left on device" in refused.output
    assert not list(disk.glob("runs/*"))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "strategy"), [(MODES[1], "ddp 2"), (MODES[0], "single"), (MODES[0], "ddp 2")])
def test_checkpoints_that_become_read_only_end_the_run(strategy: str, mode: str, disk: Path) -> None:
    line = [*LINE, *STRATEGIES[strategy], mode]

    def make_read_only() -> None:
        if Environment.read().rank == 0:
            (folder,) = disk.glob("runs/*/*/checkpoints")
            deadline = time.monotonic() + 30
            while not (folder / "step_00000002").exists() and time.monotonic() < deadline:
                time.sleep(0.01)  # it is written beside the steps
            mount("--bind", str(folder), str(folder))
            mount("-o", "remount,bind,ro", str(folder))

    failed = command(*line, root=disk / "runs", before=after_step(3, make_read_only))
    assert failed.code == 74, failed.output
    assert "Read-only file system" in failed.output
    kept = checkpoints(failed.directory)
    assert [path.name for path in kept] == ["step_00000002"]
    again = command(*line, root=disk / "runs")  # it still is
    assert again.code == 74
    subprocess.run(["umount", str(failed.directory / "checkpoints")], check=True)
    assert_same_bits(finished(*line, root=disk / "runs"), once(*LINE, *STRATEGIES[strategy]))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "strategy"), [(MODES[1], "fsdp 2"), (MODES[0], "ddp 2")])
def test_a_disk_that_is_slow_for_one_rank_is_waited_for(strategy: str, mode: str, tmp_path: Path) -> None:
    def wait(_: int) -> None:
        if Environment.read().rank == 1:
            time.sleep(0.5)

    line = [*LINE, *STRATEGIES[strategy], mode]
    ended = finished(*line, root=tmp_path / "runs", before=lambda: before_each(os, "fsync", wait))
    assert ended.summary["saves"]["committed"] == 4
    assert_same_bits(ended, once(*LINE, *STRATEGIES[strategy]))
