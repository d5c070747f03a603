"""Elastic runs: nodes are lost and come back, the run goes on, and its result is that of one process."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

import framework.launch.elastic.meeting
from framework.launch.elastic.meeting import SignedBackend
from framework.runtime.torch_internals import DynamicRendezvous
from framework.training.loop import Trainer
from tests import harness
from tests.harness import Ended, after_each, assert_close, before_each, finished, once, wait_for
from tests.launch.paced import ROOT, pace, steps_in
from tests.launch.test_local import assert_gone
from tests.test_bitwise import digest
from tests.test_hangs import loop, sleep, stop
from tests.test_resume import RUN as SMALL

RUN = [*SMALL, "precision=fp64", "micro_batch_size=4", "trainer.max_epochs=null", "trainer.max_steps=200",
       "trainer.eval_every=50", "rehearse=false"]  # fmt: skip
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

        def found() -> list[float]:
            return [at - after for at, _, _, size in self.steps() if at > after and size == world_size]

        try:
            wait_for(lambda: bool(found()), timeout_s=within_s, what=f"a step of {world_size} processes")
        except AssertionError as error:
            told = [f"--- node {number}\n{_in_short(node.output.read_text())}" for number, node in enumerate(self.nodes)]
            raise AssertionError("\n".join([str(error), *told[-3:]])) from None
        return found()[0]

    def steps(self) -> list[tuple[float, int, int, int]]:
        return steps_in(self.folder)

    def finish(self) -> None:
        self.slow.unlink()

    def finished(self, *nodes: Node) -> Ended:
        """Let the run go on at full speed to its end, on these nodes, or on all."""
        self.finish()
        return self.ended(*nodes, timeout_s=150.0)[0]  # no deadline: four tests may share two cores

    def ended(self, *nodes: Node, code: int = 0, timeout_s: float = 60.0) -> list[Ended]:
        """Wait for these nodes, or all of them, to end with this code."""
        found = [node.end(timeout_s=timeout_s) for node in nodes or self.nodes]
        assert [end.code for end in found] == [code] * len(found), "\n".join(end.output for end in found)
        return found


def _in_short(output: str) -> str:
    """Return the first and the last lines of an output, without the frames of torch's C++."""
    lines = [line for line in output.splitlines() if not line.startswith("frame #")]
    return "\n".join(lines if len(lines) < 60 else [*lines[:30], "...", *lines[-30:]])


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


def one() -> Ended:
    return once(*RUN)


def two(cluster: Callable[..., Cluster], *overrides: str) -> Cluster:
    """Two nodes that train together. The first one serves the store."""
    both = cluster(*RUN, *ELASTIC, *overrides)
    both.slow.write_text("1.0")  # however late the second node comes, the run has not ended
    began = time.time()
    both.start()
    wait_for_store(both)  # the first node serves it
    both.start()
    both.wait_for_step(world_size=2, after=began, within_s=100)
    both.slow.write_text("")
    return both


def wait_for_store(cluster: Cluster) -> None:
    wait_for(lambda: any(cluster.root.rglob(".*.elastic/store.json")), what="the store of the first node")


def assert_no_trace(cluster: Cluster) -> None:
    assert not [path for path in cluster.root.rglob("*") if path.name.endswith(".elastic")]


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_node_lost_and_a_node_back(comes_back: bool, cluster: Callable[..., Cluster]) -> None:
    half = "trainer.max_steps=100"
    both = two(cluster, half, "launch.max_restarts=0")  # neither is a failure
    both.slow.write_text("0.6")
    killed_at = time.time()
    both.nodes[1].kill()
    both.wait_for_step(world_size=1, after=killed_at, within_s=LOST_S)
    working = [both.nodes[0]]
    if comes_back:
        back_at = time.time()
        working.append(both.start())
        both.wait_for_step(world_size=2, after=back_at, within_s=JOINED_S)
    ended = both.finished(*working)
    assert_close(ended, once(*RUN, half))
    assert "restart " not in ended.output
    assert_no_trace(both)
    if comes_back:
        assert "finished already" in both.ended(both.start())[0].output


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["agent 1", "worker of agent 0"])
def test_a_signal_to_any_process_stops_the_run_on_all_nodes(whom: str, cluster: Callable[..., Cluster]) -> None:
    both = two(cluster)
    node = both.nodes[int(whom[-1])]
    pid = psutil.Process(node.pid).children()[0].pid if "worker" in whom else node.pid
    os.kill(pid, signal.SIGTERM)
    ended = both.ended(code=75, timeout_s=15)[0]
    assert ended.summary["status"] == "preempted"
    assert ended.summary["step"] == max(step for _, step, _, _ in both.steps())  # nothing is lost
    assert_no_trace(both)
    assert_close(both.finished(both.start()), one())  # the same command, on one node


def fail_from(number: int) -> Callable[[], None]:
    """Have a rank fail in this step and in all later ones: whenever its node joins again, it fails again."""

    def look(trainer: Trainer, *_: object, **__: object) -> None:
        if trainer.progress.step >= number:
            raise RuntimeError("a mistake of the user's")

    return lambda: after_each(Trainer, "train_step", look)


@pytest.mark.slow
def test_an_error_on_one_node_ends_the_run_on_all_when_it_comes_again(cluster: Callable[..., Cluster]) -> None:
    both = cluster(*RUN, *ELASTIC)
    both.start(), both.start(before=fail_from(12))
    ended = both.ended(code=1, timeout_s=150)
    told = r"rank (\d) failed: RuntimeError: a mistake of the user's"
    assert len(re.findall(told + "; restart 1 of 3", ended[1].output)) == 1, ended[1].output
    assert re.search(told + r"\n  at .*test_elastic.py:\d+ in look\n", ended[1].output), ended[1].output
    (error,) = re.findall(r"the run has failed: (rank \d: RuntimeError: a mistake of the user's)", ended[0].output)
    assert ended[0].summary["status"] == "failed" and ended[0].summary["error"] == error
    assert_no_trace(both)


@pytest.mark.slow
def test_run_resume_never_starts_over_once_and_not_in_every_round(cluster: Callable[..., Cluster]) -> None:
    both = two(cluster)
    both.nodes[0].signal(signal.SIGTERM)
    (name,) = {node.end().directory.name for node in both.nodes}
    again_at = time.time()
    both.start("run.resume=never")
    wait_for_store(both)
    both.start("run.resume=never")
    wait_for(
        lambda: any(at > again_at and step >= 20 and size == 2 for at, step, _, size in both.steps()),
        timeout_s=100,
        what="step 20 of two nodes",
    )
    killed_at = time.time()
    both.nodes[3].kill()
    both.finished(both.nodes[2])
    assert sorted(path.name for path in both.root.glob("*/*")) == [name, f"{name}.old-1"]
    steps = [step for at, step, _, _ in both.steps() if at > again_at]
    assert steps[0] == 1
    assert min(step for at, step, _, _ in both.steps() if at > killed_at + 1.0) > 16  # from a checkpoint


@pytest.mark.slow
def test_too_few_nodes_are_not_waited_for_for_ever(cluster: Callable[..., Cluster]) -> None:
    two_or_none = cluster(*RUN, *ELASTIC, "launch.nnodes=2", "launch.timeout_s=1")
    (alone,) = two_or_none.ended(two_or_none.start(), code=1)
    assert alone.output.endswith("the run has failed: 1 of at least 2 nodes have joined within launch.timeout_s=1\n")
    assert_no_trace(two_or_none)


@pytest.mark.slow  # the nodes that are there may be dead: that takes a while to know
def test_another_command_on_another_node_is_refused(cluster: Callable[..., Cluster]) -> None:
    both = cluster(*RUN, *ELASTIC)
    began = time.time()
    both.start()
    both.wait_for_step(world_size=1, after=began, within_s=60)
    (refused,) = both.ended(both.start("launch.nnodes=1:3"), code=78)
    assert "another command than on the run's other nodes: sizes [1, 2, 3] here and [1, 2] there" in refused.output
    both.finished(both.nodes[0])


@pytest.mark.slow
def test_a_node_with_another_time_is_refused(cluster: Callable[..., Cluster]) -> None:
    def be_late() -> None:
        clock = SimpleNamespace(time=lambda: time.time() - 60, monotonic=time.monotonic, sleep=time.sleep)
        framework.launch.elastic.meeting.time = clock

    both = cluster(*RUN, *ELASTIC)
    both.start()
    wait_for_store(both)
    (refused,) = both.ended(both.start(before=be_late), code=78)
    assert re.search("the clock of this host differs by -(59|60|61) s from that of ", refused.output)
    both.finished(both.nodes[0])


# --- the long ones

BITWISE = [*RUN, "invariance=bitwise", "trainer.max_steps=600", "trainer.eval_every=200"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_killed_at_any_moment(tmp_path: Path, cluster: Callable[..., Cluster]) -> None:
    """Also the node that serves the store: then the other node ends with 75, and both commands are given again."""
    reference = finished(*BITWISE, root=tmp_path / "one")
    rng, both = random.Random(1), cluster(*BITWISE, *ELASTIC)
    alive = [both.start(), both.start()]
    for _ in range(4):
        time.sleep(rng.uniform(0.0, 14.0))
        for _ in range(rng.choice([1, 1, 2])):
            with suppress(psutil.NoSuchProcess):  # it has ended already
                alive.pop(rng.randrange(len(alive))).kill()
        assert {code for node in alive if (code := node._wait(0.0)) is not None} <= {75}, "the store was lost"
        alive = [node for node in alive if node._wait(0.0) is None]
        while len(alive) < 2:
            alive.append(both.start())
    both.finish()
    ended = [node.end(timeout_s=240) for node in alive]
    while [end.code for end in ended] != [0, 0]:
        assert {end.code for end in ended} <= {0, 75}, ended[0].output + ended[1].output
        ended = [both.start().end(timeout_s=240) for _ in alive]
    assert digest(ended[0]) == digest(reference)
    assert_no_trace(both)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_number_of_nodes_that_does_not_fit_the_mesh_leaves_a_node_in_reserve(cluster: Callable[..., Cluster]) -> None:
    four = cluster(*RUN, "parallel=hsdp", "parallel.shard=2", "launch.nproc_per_node=1", "launch.nnodes=2:4")
    began = time.time()
    four.start()
    wait_for_store(four)
    four.start(), four.start()
    four.wait_for_step(world_size=2, after=began, within_s=60)
    killed_at = time.time()
    sizes = {size for _, _, _, size in four.steps()}
    working = [node for node in four.nodes[1:] if psutil.Process(node.pid).children()]
    assert sizes == {2} and len(working) == 1
    working[0].kill()
    four.wait_for_step(world_size=2, after=killed_at, within_s=LOST_S)
    four.finished(*(node for node in four.nodes if node is not working[0]))


@pytest.mark.slow
def test_a_machine_that_falls_silent_is_gone_on_without(cluster: Callable[..., Cluster]) -> None:
    """No connection is closed and no lock is let go: all its processes are stopped. Later they come back."""
    both = two(cluster)
    processes = all_of(both.nodes[1])
    silent_at = time.time()
    for process in processes:
        process.suspend()
    both.wait_for_step(world_size=1, after=silent_at, within_s=LOST_S)
    back_at = time.time()
    for process in processes:
        process.resume()
    both.wait_for_step(world_size=2, after=back_at, within_s=JOINED_S)
    assert_close(both.finished(), one())


def all_of(node: Node) -> list[psutil.Process]:
    return [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_the_loss_of_the_node_that_serves_the_store_ends_the_run_which_the_same_command_continues(
    how: str, cluster: Callable[..., Cluster]
) -> None:
    both = two(cluster)
    lost_at, last = time.time(), max(step for _, step, _, _ in both.steps())
    if how == "killed":
        both.nodes[0].kill()
    else:
        for process in all_of(both.nodes[0]):
            process.suspend()
    (ended,) = both.ended(both.nodes[1], code=75, timeout_s=LOST_S)
    assert "the store of the run's nodes does not answer" in ended.output, ended.output
    assert ended.summary["status"] == "preempted"
    if how == "frozen":
        for process in all_of(both.nodes[0]):
            process.kill()
        both.nodes[0]._wait(5.0)
    assert_close(both.finished(both.start(), both.start()), one())
    assert min(step for at, step, _, _ in both.steps() if at > lost_at + 1.0) > last - 8, "from a checkpoint"
    assert_no_trace(both)


HANGS: dict[str, tuple[Callable[[], object], int | None, list[str]]] = {
    "stopped": (stop, 1, ["rank 1 hangs: it is stopped", "no rank of this node hangs", "rank 0"]),
    "looping": (loop, 0, ["rank 0 hangs: it computes", "rank 1"]),
    "all sleeping": (sleep, None, ["rank 0 hangs: it waits, but not", "rank 1 hangs: it waits, but not"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", [*HANGS])
def test_the_guilty_rank_is_named_wherever_it_is(what: str, cluster: Callable[..., Cluster]) -> None:
    act, rank, said = HANGS[what]
    both = cluster(*RUN, *ELASTIC, "launch.nnodes=2", "launch.timeout_s=20", "checkpoint.every=10")
    for _ in range(2):
        both.start(before=at_step(20, act, on_rank=rank))
    found = both.ended(code=71, timeout_s=120)
    for text in (found[0].output, found[1].output, str(found[0].summary["error"])):
        assert all(words in text for words in said), text
    assert found[0].summary["status"] == "failed"
    assert_no_trace(both)


def at_step(step: int, act: Callable[[], object], *, on_rank: int | None) -> Callable[[], None]:
    """Have a rank, or all, do something after a step instead of going on."""

    def look(trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.progress.step == step and on_rank in (None, trainer.world.rank):
            act()

    return lambda: before_each(Trainer, "train_step", look)


@pytest.mark.slow
def test_a_node_that_is_missed_for_too_long_is_named(cluster: Callable[..., Cluster]) -> None:
    both = two(cluster, "launch.nnodes=2", "launch.timeout_s=30")
    for process in all_of(both.nodes[1]):
        process.suspend()
    (ended,) = both.ended(both.nodes[0], code=1, timeout_s=120)
    assert ", with rank 1, was lost" in ended.output, ended.output
    assert "1 of at least 2 nodes" in ended.summary["error"]


def test_no_thread_asks_the_store_after_the_run() -> None:
    """An interpreter that ends while such a thread waits in C++ aborts: Slurm would then count the node as failed."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    nodes = DynamicRendezvous.from_backend("run", store, C10dRendezvousBackend(store, "run"), 1, 1, "node")
    nodes.use_store(store, "127.0.0.1", store.port)
    nodes.next_rendezvous()
    assert any("KeepAlive" in thread.name for thread in threading.enumerate())
    nodes.end_heartbeats()
    assert not any("KeepAlive" in thread.name for thread in threading.enumerate())


def test_torch_reads_only_a_record_that_a_node_of_the_run_has_signed() -> None:
    store = HashStore()
    ours = SignedBackend(store, secret="ours", serves=True, before_join=lambda: None)
    theirs = SignedBackend(store, secret="theirs", serves=False, before_join=lambda: None)
    ours.set_state(b"a record")
    assert ours.get_state()[0] == b"a record"
    with pytest.raises(RuntimeError, match="changed by another program"):
        theirs.get_state()
    theirs._secret = ours._secret
    assert theirs.get_state()[0] == b"a record"


TORCHRUN = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=20", "--rdzv-backend=c10d",
            "--rdzv-id=test", "--local-addr=127.0.0.1"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_loses_a_node_and_takes_it_back(cluster: Callable[..., Cluster]) -> None:
    both = cluster(*RUN, "parallel=ddp", "trainer.max_steps=300")
    reference = finished(*RUN, "trainer.max_steps=300", root=both.folder / "one")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of no node
    settings = "is_host=false,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=8"
    rendezvous = [f"--rdzv-endpoint=127.0.0.1:{store.port}", f"--rdzv-conf={settings}"]
    command = [sys.executable, *TORCHRUN, *rendezvous, ROOT / "tests/launch/paced.py", both.folder, *both.overrides]

    def start() -> Node:
        output = both.folder / f"node_{len(both.nodes)}.output"
        environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(output, "wb") as file:
            return both._add(subprocess.Popen(command, stdout=file, stderr=file, env=environment), output)

    began = time.time()
    start(), start()
    both.wait_for_step(world_size=2, after=began, within_s=90)
    killed_at = time.time()
    both.nodes[0].kill()
    both.wait_for_step(world_size=1, after=killed_at, within_s=LOST_S)
    back_at = time.time()
    start()
    both.wait_for_step(world_size=2, after=back_at, within_s=JOINED_S)
    assert_close(both.finished(*both.nodes[1:]), reference)
