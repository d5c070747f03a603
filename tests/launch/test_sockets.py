"""On one machine, no process of a run listens to any other machine."""

import ipaddress
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from framework.distributed.groups import _tcp_store, awaited
from framework.runtime.environment import Environment
from framework.runtime.exits import Interrupted
from tests.harness import begin, command, end, wait_for
from tests.listening import addresses
from tests.test_loggers import RUN

ROOT = Path(__file__).resolve().parent.parent.parent
LINE = [*RUN, "dataset._target_=tests.listening.Listening"]
TWO = "launch.nproc_per_node=2"


def assert_loopback(folder: Path, *, processes: int, besides: int | None = None) -> None:
    """All that was written down is loopback, and there is something; the launcher `besides` is not ours."""
    inherited = {port for _, _, port in json.loads((folder / "inherited").read_text())}
    notes = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert len(notes) == processes
    found = {(pid, address) for note in notes for pid, address, port in note if pid != besides and port not in inherited}
    assert found or processes == 1, "nothing listens: has the test looked?"
    assert all(ipaddress.ip_address(address).is_loopback for _, address in found), found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "listening"
    folder.mkdir()
    # what an earlier test has left open in this process is inherited by the forked ones: it is not the run's
    (folder / "inherited").write_text(json.dumps(addresses({os.getpid()})))
    monkeypatch.setenv("LISTENING", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


@pytest.fixture
def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["parallel=ddp", TWO, "logger=[tensorboard,wandb]", "logger.wandb.mode=offline"],
        ["parallel=parameter-server", TWO],
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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(ROOT / "train.py")]
    agent = subprocess.Popen([*torchrun, *LINE, "rehearse=false", "parallel=ddp", f"run.root={tmp_path / 'runs'}"])
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


def print_meetings(port: int) -> None:
    """Two ranks of each of two steps meet at once, on ports from the same one on, which another program has: it never answers."""

    def meet(step: str, rank: int) -> str:
        place = Environment(rank=rank, world_size=2, local_world_size=2, master_port=port, step=step)
        store = _tcp_store(place)
        kept.append(store)
        store.set(str(rank), step)
        return bytes(store.get(str(1 - rank))).decode()

    kept: list[dist.Store] = []
    with socket.create_server(("127.0.0.1", port)), ThreadPoolExecutor(4) as pool:
        asked = [(step, pool.submit(meet, step, rank)) for rank in (1, 0) for step in ("7.0", "8.0")]
        print(json.dumps([(step, found.result()) for step, found in asked]), flush=True)
    os._exit(0)


@pytest.mark.slow
def test_two_steps_of_slurm_with_the_same_port_never_meet(free_port: int) -> None:
    program = f"from tests.launch.test_sockets import print_meetings; print_meetings({free_port})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert all(step == found for step, found in json.loads(done.stdout)), done.stdout


@pytest.mark.slow
def test_ranks_wait_as_long_as_rank_0_works() -> None:
    store, is_over = dist.HashStore(), threading.Event()

    def work() -> None:
        while not is_over.wait(0.05):
            store.add("signs", 1)

    worker = threading.Thread(target=work)
    worker.start()
    threading.Timer(1.5, lambda: store.set("decision", "0")).start()
    assert awaited(store, "decision", timeout=timedelta(seconds=0.5), sign="signs") == b"0"
    is_over.set()
    worker.join()
    with pytest.raises(Interrupted, match="not all processes of the run have started"):
        awaited(store, "another", timeout=timedelta(seconds=0.5), sign="signs")


def test_a_wrong_key_ends_all_processes_of_a_launcher_at_once(tmp_path: Path, free_port: int) -> None:
    def rank(number: str) -> Any:
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
        place |= {"RANK": number, "LOCAL_RANK": number}
        return begin("optimizer.lrr=1", "parallel=ddp", root=tmp_path / "runs", before=lambda: os.environ.update(place))

    waiting = rank("1")
    wait_for((tmp_path / "runs.output").exists, what="rank 1, which says nothing")
    first, began = end(rank("0"), root=tmp_path / "runs"), time.monotonic()
    second = end(waiting, root=tmp_path / "runs")
    assert (first.code, second.code) == (78, 78) and time.monotonic() - began < 3.0
    assert second.output.startswith("optimizer.lrr: unknown key") and second.output.count("\n") == 1
    assert not list((tmp_path / "runs").iterdir())
