"""Elastic runs: nodes are lost and come back, the run goes on, and its result is that of one process."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import harness
from tests.harness import Ended, assert_close, command, exact_rows, finished
from tests.launch.paced import ROOT, pace
from tests.launch.test_local import assert_gone, wait_for
from tests.test_bitwise import digest
from tests.test_resume import RUN as SMALL
from tests.test_resume import after_step

RUN = [*SMALL, "precision=fp64", "micro_batch_size=4", "trainer.max_epochs=null", "trainer.max_steps=400",
       "trainer.eval_every=50"]  # fmt: skip
ELASTIC = ["parallel=ddp", "launch.nproc_per_node=1", "launch.nnodes=1:2"]
LOST_S, JOINED_S = 25.0, 40.0


class Node:
    """The command on one node: all nodes are on this machine, each in a process group of its own."""

    def __init__(self, process: Any, *, output: Path, root: Path) -> None:
        self.process = process
        self.pid: int = process.pid
        self.output = output
        self.root = root

    def kill(self) -> None:
        """Lose the node: its agent, as in kill -9. Its workers go with it."""
        workers = [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        os.kill(self.pid, signal.SIGKILL)
        assert_gone(workers, timeout_s=5.0)
        self._wait(5.0)

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def end(self, *, timeout_s: float = 60.0) -> Ended:
        code = self._wait(timeout_s)
        assert code is not None, f"still running after {timeout_s} s\n{self.output.read_text()[-3000:]}"
        return Ended(code, self.output.read_text(), self.root)

    def _wait(self, timeout_s: float) -> int | None:
        if isinstance(self.process, subprocess.Popen):
            try:
                return self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
        self.process.join(timeout_s)
        return self.process.exitcode


class Cluster:
    """Nodes that share a folder. `start` gives one the command, forked from the warm tests; `start_cold` as a person would."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.root = folder / "runs"
        self.overrides = [*overrides, f"run.root={self.root}"]
        self.slow = folder / "slow"
        self.slow.touch()
        self.nodes: list[Node] = []

    def start(self, *overrides: str, before: Callable[[], None] = lambda: None) -> Node:
        def plant() -> None:
            pace(self.folder)()
            before()

        output = self.folder / f"node_{len(self.nodes)}.output"
        arguments = ([*self.overrides, *overrides], output, plant, os._exit, False)
        process = harness._FORK.Process(target=harness._child, args=arguments)
        process.start()
        return self._add(process, output)

    def start_cold(self) -> Node:
        output = self.folder / f"node_{len(self.nodes)}.output"
        arguments = [sys.executable, ROOT / "tests/launch/paced.py", self.folder, *self.overrides]
        with open(output, "wb") as file:
            return self._add(subprocess.Popen(arguments, stdout=file, stderr=file), output)

    def _add(self, process: Any, output: Path) -> Node:
        self.nodes.append(Node(process, output=output, root=self.root))
        return self.nodes[-1]

    def wait_for_step(self, *, world_size: int, after: float, within_s: float) -> float:
        """Wait for a step of so many processes; return how many seconds after `after` it was done."""
        found: list[float] = []

        def is_there() -> bool:
            for at, _, _, size in self.steps():
                if at > after and size == world_size:
                    found.append(at - after)
            return bool(found)

        try:
            wait_for(is_there, timeout_s=within_s, what=f"a step of {world_size} processes")
        except AssertionError as error:
            told = [f"--- node {number}\n{node.output.read_text()[-2000:]}" for number, node in enumerate(self.nodes)]
            raise AssertionError("\n".join([str(error), *told[-3:]])) from None
        return found[0]

    def steps(self) -> list[tuple[float, int, int, int]]:
        """Time, step, rank, world size."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(at), int(step), int(rank), int(size)) for at, step, rank, size in map(str.split, lines)]

    def finish(self) -> None:
        self.slow.unlink()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(*overrides: str) -> Cluster:
        made.append(Cluster(tmp_path, *overrides))
        return made[-1]

    yield make
    for one in made:
        for node in one.nodes:
            node.process.kill()
            node._wait(10.0)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return finished(*RUN, root=tmp_path_factory.mktemp("one") / "runs")


def two(cluster: Callable[..., Cluster], *overrides: str) -> Cluster:
    """Two nodes that train together."""
    both = cluster(*RUN, *ELASTIC, *overrides)
    began = time.time()
    both.start()
    both.start()
    both.wait_for_step(world_size=2, after=began, within_s=60)
    return both


def assert_no_trace(cluster: Cluster) -> None:
    """Nothing of the nodes' meeting is left."""
    assert not [path for path in cluster.root.rglob("*") if path.name.endswith(".elastic")]


def test_a_node_lost_and_a_node_back(one: Ended, cluster: Callable[..., Cluster]) -> None:
    both = two(cluster)
    killed_at = time.time()
    both.nodes[0].kill()  # the first: rank 0, and the oldest
    lost_s = both.wait_for_step(world_size=1, after=killed_at, within_s=LOST_S)
    back_at = time.time()
    both.start()
    joined_s = both.wait_for_step(world_size=2, after=back_at, within_s=JOINED_S)
    print(f"lost: {lost_s:.1f} s, joined: {joined_s:.1f} s")
    both.finish()
    ended = [node.end() for node in both.nodes[1:]]
    assert [end.code for end in ended] == [0, 0], ended[0].output + ended[1].output
    assert_close(ended[0], one)
    assert "restart " not in ended[0].output  # a lost node is no failure
    assert_no_trace(both)
    late = both.start().end()
    assert late.code == 0 and "finished already" in late.output


@pytest.mark.parametrize("whom", ["agent 0", "agent 1", "worker of agent 1"])
def test_a_signal_to_any_process_stops_the_run_on_all_nodes(
    whom: str, one: Ended, cluster: Callable[..., Cluster]
) -> None:
    both = two(cluster)
    node = both.nodes[int(whom[-1])]
    pid = psutil.Process(node.pid).children()[0].pid if "worker" in whom else node.pid
    os.kill(pid, signal.SIGTERM)
    ended = [node.end(timeout_s=15) for node in both.nodes]
    assert [end.code for end in ended] == [75, 75], ended[0].output + ended[1].output
    assert ended[0].summary["status"] == "preempted"
    assert ended[0].summary["step"] == max(step for _, step, _, _ in both.steps())  # nothing is lost
    assert_no_trace(both)
    both.finish()
    again = both.start().end()  # the same command, on one node
    assert again.code == 0, again.output
    assert_close(again, one)
