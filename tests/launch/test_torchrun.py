"""Under torchrun: the same run in the same single directory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.harness import Ended, assert_same_bits, finished, once, wait_for_checkpoint
from tests.launch.test_local import assert_gone
from tests.test_resume import RUN

ROOT = Path(__file__).resolve().parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(ROOT / "train.py")]
DDP = [*RUN, "parallel=ddp"]


def torchrun(*overrides: str, root: Path) -> Ended:
    command = [*TORCHRUN, *overrides, f"run.root={root}"]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    return Ended(done.returncode, done.stdout, root)


@pytest.mark.slow
def test_torchrun_gives_the_same_run_as_our_own_workers(tmp_path: Path) -> None:
    ours = finished(*DDP, "launch.nproc_per_node=2", root=tmp_path / "ours")
    theirs = torchrun(*DDP, root=tmp_path / "theirs")
    assert theirs.code == 0, theirs.output
    assert theirs.directory.relative_to(theirs.root) == ours.directory.relative_to(ours.root)
    assert_same_bits(theirs, ours)
    again = torchrun(*DDP, root=tmp_path / "theirs")
    assert again.code == 0 and again.output.count("finished already") == 1, again.output


@pytest.mark.slow
def test_a_sweep_under_torchrun_is_refused(tmp_path: Path) -> None:
    failed = torchrun(*DDP, "-m", "seed=1,2", root=tmp_path / "runs")
    assert failed.output.count("-m: a sweep cannot run under torchrun or mpirun (python train.py -m ..., with ") == 1, (
        failed.output
    )
    assert not failed.root.exists()


@pytest.mark.slow
def test_kill_9_of_torchrun_leaves_no_orphan(tmp_path: Path) -> None:
    long = [*DDP, "rehearse=false", "trainer.max_epochs=100000", f"run.root={tmp_path / 'runs'}"]
    agent = subprocess.Popen([*TORCHRUN, *long], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_checkpoint(tmp_path / "runs")
        workers = [child.pid for child in psutil.Process(agent.pid).children(recursive=True)]
        assert len(workers) >= 2
        os.kill(agent.pid, signal.SIGKILL)
        assert_gone(workers)
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.slow
def test_a_rank_that_has_lost_its_partner_says_so(tmp_path: Path) -> None:
    long = [*DDP, "trainer.max_epochs=100000", f"run.root={tmp_path / 'runs'}"]
    agent = subprocess.Popen([*TORCHRUN, *long], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_for_checkpoint(tmp_path / "runs")
        (victim,) = [child for child in psutil.Process(agent.pid).children() if child.environ().get("RANK") == "1"]
        victim.kill()
        output, _ = agent.communicate(timeout=60)
    finally:
        agent.kill()
        agent.wait()
    assert "rank 0 failed: another process of the run has ended; if it logged an error, the error is in train.log" in output


LONG = [*DDP, "trainer.max_epochs=100", "trainer.eval_every=null", "trainer.log_every=100", "checkpoint.every=100"]


def whole() -> Ended:
    return once(*LONG, "launch.nproc_per_node=2")


# torchrun dies of other signals than TERM and INT, and its workers with it, unless it is told of them
ALL_SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGUSR2"


@pytest.mark.slow
def test_torchrun_stopped_by_a_signal_leaves_a_checkpoint_to_continue_from(tmp_path: Path) -> None:
    command = [*TORCHRUN[:-1], ALL_SIGNALS, TORCHRUN[-1], *LONG, f"run.root={tmp_path / 'runs'}"]
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_checkpoint(tmp_path / "runs")
        agent.send_signal(signal.SIGUSR1)
        agent.wait(timeout=60)
    finally:
        agent.kill()
        agent.wait()
    stopped = Ended(agent.returncode, "", tmp_path / "runs")
    assert stopped.summary["status"] == "preempted"
    assert_same_bits(finished(*LONG, "launch.nproc_per_node=2", root=tmp_path / "runs"), whole())
