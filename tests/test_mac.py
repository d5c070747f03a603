"""What a run needs of Linux: nothing. On a system without /proc, prctl, real-time signals and CPU affinity, all is the same.

This emulates what a Mac lacks. No Mac has run it: its compiler, its fork and its gloo are not emulated.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from framework.config.folders import ROOT
from tests.harness import Ended, assert_close, wait_for
from tests.hosts import needs_hosts

LINE = ["model=mlp", "dataset=synthetic", "dataset.image_size=8", "dataset.num_train=40", "dataset.num_val=8", "dataset.num_test=8", "precision=fp64",
        "global_batch_size=8", "micro_batch_size=4", "trainer.max_epochs=null", "trainer.max_steps=8", "trainer.log_every=1", "checkpoint.every=2"]  # fmt: skip
# a /dev of its own, because /dev/fd is a link to /proc; then the real /proc is hidden
_ENTER = """set -e
mount --make-rprivate /
mkdir -p /mnt/proc "$0/dev" && mount -t tmpfs none /mnt && mkdir /mnt/proc && mount --bind /proc /mnt/proc
mount -t tmpfs none "$0/dev"
for name in null zero random urandom full tty shm; do
  if [ -d /dev/$name ]; then mkdir "$0/dev/$name"; else touch "$0/dev/$name"; fi
  mount --bind /dev/$name "$0/dev/$name"
done
ln -s /mnt/proc/self/fd "$0/dev/fd"
mount --rbind "$0/dev" /dev
mount -t tmpfs none /proc
exec "$@"
"""


def on_a_mac(*words: str, folder: Path) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "train.py"), *words, f"run.root={folder / 'runs'}"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests' / 'mac'}:{ROOT}"}
    enter = ["unshare", "--mount", "sh", "-c", _ENTER, str(folder), *command]
    return subprocess.Popen(enter, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finished(*words: str, folder: Path) -> Ended:
    process = on_a_mac(*words, folder=folder)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    return Ended(process.returncode, output, folder / "runs")


@pytest.mark.slow
@needs_hosts
def test_one_process_and_several_compute_the_same_and_continue_after_a_kill(tmp_path: Path) -> None:
    one = finished(*LINE, folder=tmp_path / "one")
    two = [*LINE, "parallel=ddp", "launch.nproc_per_node=2", "dataset.num_workers=1"]
    assert_close(finished(*two, folder=tmp_path / "two"), one)
    killed = on_a_mac(*two, "trainer.max_steps=100000", folder=tmp_path / "cut")
    wait_for(lambda: bool([*(tmp_path / "cut").glob("runs/*/*/checkpoints/step_*")]), what="a checkpoint")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)  # its ranks end with it: they hold its standard output
    status = finished("mode=status", folder=tmp_path / "cut").output
    assert "killed" in status, status


@pytest.mark.slow
@needs_hosts
def test_jobs_of_a_sweep_run_at_the_same_time(tmp_path: Path) -> None:
    swept = finished("-m", *LINE, "seed=0,1", "hydra.launcher.n_jobs=-1", folder=tmp_path / "sweep")
    assert "2 jobs: 2 finished" in swept.output, swept.output
