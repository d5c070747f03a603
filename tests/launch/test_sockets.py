"""On one machine, no process of a run listens to any other machine."""

import ipaddress
import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.launch.test_mpi import ALLOWED, MPIRUN, needs_mpi

from framework.distributed.groups import awaited
from framework.runtime.exits import Interrupted
from tests.harness import command
from tests.test_loggers import RUN

ROOT = Path(__file__).resolve().parent.parent.parent
LINE = [*RUN, "dataset._target_=tests.listening.Listening"]
TWO = "launch.nproc_per_node=2"


def assert_loopback(folder: Path, *, processes: int, besides: int | None = None) -> None:
    """All that was written down is loopback, and there is something; the launcher `besides` is not ours."""
    notes = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert len(notes) == processes
    found = {(pid, address) for note in notes for pid, address in note if pid != besides}
    assert found or processes == 1, "nothing listens: has the test looked?"
    assert all(ipaddress.ip_address(address).is_loopback for _, address in found), found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "listening"
    folder.mkdir()
    monkeypatch.setenv("LISTENING", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


@pytest.fixture
def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize(
    "more",
    [
        ["parallel=ddp", TWO, "logger=[tensorboard,wandb]", "logger.wandb.mode=offline"],
        ["parallel=fsdp", TWO],
        ["parallel=parameter-server", TWO],
        ["parallel=parameter-server", "parallel.mode=async", TWO],
        ["logger=wandb", "logger.wandb.mode=offline"],
    ],
    ids=" ".join,
)
def test_our_own_workers_listen_on_loopback_only(more: list[str], folder: Path, tmp_path: Path) -> None:
    run = command(*LINE, *more, root=tmp_path / "runs")
    assert run.code == 0, run.output
    assert_loopback(folder, processes=2 if TWO in more else 1)


@pytest.mark.slow
def test_workers_of_torchrun_listen_on_loopback_only(folder: Path, tmp_path: Path) -> None:
    line = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(ROOT / "train.py"),
        *LINE,
        "rehearse=false",
        "parallel=ddp",
    ]
    agent = subprocess.Popen([sys.executable, *line, f"run.root={tmp_path / 'runs'}"])
    assert agent.wait(timeout=120) == 0
    assert_loopback(folder, processes=2, besides=agent.pid)  # torchrun's own store listens everywhere (pytorch#173909)


@pytest.mark.slow
def test_workers_of_any_launcher_listen_on_loopback_only(folder: Path, tmp_path: Path, free_port: int) -> None:
    """One that only sets torchrun's variables: the store is rank 0's."""
    line = [sys.executable, str(ROOT / "train.py"), *LINE, "rehearse=false", "parallel=ddp", f"run.root={tmp_path / 'runs'}"]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
    ranks = [subprocess.Popen(line, env=os.environ | place | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert_loopback(folder, processes=2)


@pytest.mark.slow
@needs_mpi
def test_gloo_under_mpirun_listens_on_loopback_only(folder: Path, tmp_path: Path) -> None:
    line = [
        str(MPIRUN),
        "-n",
        "2",
        sys.executable,
        str(ROOT / "train.py"),
        *LINE,
        "parallel=ddp",
        f"run.root={tmp_path / 'runs'}",
    ]
    process = subprocess.Popen(line, env=os.environ | ALLOWED | {"TMPDIR": str(tmp_path)})
    assert process.wait(timeout=120) == 0
    assert_loopback(folder, processes=2, besides=process.pid)


def test_a_wait_for_the_others_ends() -> None:
    with pytest.raises(Interrupted, match="not all processes of the run have started within 0 s; the same command tries again"):
        awaited(dist.HashStore(), "decision", timeout=timedelta(seconds=0.2))
