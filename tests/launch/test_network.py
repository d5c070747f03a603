"""Elastic runs on hosts of their own: links that are cut and come back, and names that mean nothing to other hosts."""

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from framework.checkpoint.store import CheckpointStore
from framework.training.loop import Trainer
from tests.harness import Ended, Says, assert_close, exact_rows, once, slow_but, wait_for
from tests.hosts import Host, hosts, mount_remote, needs_fuse, needs_hosts
from tests.launch.paced import ROOT
from tests.launch.test_elastic import ELASTIC, JOINED_S, LOST_S, RUN, Cluster, assert_no_trace
from tests.test_hangs import loop, sleep, stop

pytestmark = [needs_hosts, pytest.mark.timeout(300)]


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


def begun(cluster: Cluster, on: list[Host], *, before: Callable[[], None] = lambda: None) -> None:
    """Start a node on each host, in their order, and wait for a step of all."""
    began = time.time()
    for host in on:
        cluster.start(before=lambda host=host: (host.enter(), before())[0])
        wait_for(lambda: len(list(cluster.root.rglob("node_*"))) >= len(cluster.nodes), what="the node's first beat")
    cluster.wait_for_step(world_size=len(on), after=began, within_s=60)


def ended(cluster: Cluster, reference: Ended) -> None:
    """Let all nodes end, and compare what they have computed."""
    cluster.finish()
    found = [node.end(timeout_s=120) for node in cluster.nodes]
    assert [end.code for end in found] == [0] * len(found), "\n".join(end.output[-3000:] for end in found)
    assert_close(found[0], reference)
    steps = [row["step"] for row in exact_rows(found[0]) if row["split"] == "train"]
    assert len(steps) == len(set(steps)), "each row once"
    assert_no_trace(cluster)


def cut(how: str, host: Host, other: Host) -> None:
    match how:
        case "link":
            host.down()
        case "one way":
            host.drop()
        case "a pair":
            host.drop(source=other)


def mend(how: str, host: Host) -> None:
    host.up() if how == "link" else host.heal()


def waits_at(folder: Path, owner: Any, name: str, condition: Callable[..., bool]) -> Callable[[], None]:
    """Have every rank say, in `folder`/there, that it has come to a call, and wait there until `folder`/cut exists."""

    def plant() -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if condition(*args, **kwargs) and not (folder / "cut").exists():
                (folder / "there").touch()
                wait_for((folder / "cut").exists, what="the cut")
            return original(*args, **kwargs)

        setattr(owner, name, call)

    return plant


MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "training": (Trainer, "train_step", lambda trainer, *_, **__: trainer.progress.step == 30),
    "saving": (CheckpointStore, "_write", lambda store, staging, tensors: staging.name.endswith("40")),
    "committing": (CheckpointStore, "_commit", lambda store, staging, *_: staging.name.endswith("40")),
    "evaluation": (Trainer, "evaluate", lambda trainer, split: trainer.progress.step == 50),
}
CASES = [*itertools.product(MOMENTS, ["link", "one way"], [1, 0])]


@pytest.mark.parametrize("case", slow_but([], CASES), ids=lambda case: f"{case[1]} in {case[0]}, of node {case[2]}")
def test_a_node_that_is_cut_off_is_gone_on_without_and_joins_again(
    case: tuple[str, str, int], cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """The files are on another network, which is not cut; all settings are the defaults."""
    moment, how, number = case
    both = cluster(*RUN, *ELASTIC, "checkpoint.every=20")
    with hosts(2, tmp_path) as on:
        begun(both, on, before=waits_at(tmp_path, *MOMENTS[moment]))
        wait_for((tmp_path / "there").exists, what=moment)
        cut_at = time.time()
        cut(how, on[number], on[1 - number])
        (tmp_path / "cut").touch()
        lost_s = both.wait_for_step(world_size=1, after=cut_at + 5.0, within_s=LOST_S) + 5.0
        print(f"{how} cut in {moment}: {lost_s:.1f} s")
        text = both.nodes[0].output.read_text()
        assert re.search(r"node2 cannot be reached from node1 \(10\.77\.0\.2.*: no answer in 8 s\)", text), text
        alone_from = time.time()
        both.wait_for_step(world_size=1, after=alone_from, within_s=5.0)
        assert len({rank for at, _, rank, _ in both.steps() if at > alone_from}) == 1, "the other waits"
        mended_at = time.time()
        mend(how, on[number])
        both.wait_for_step(world_size=2, after=mended_at, within_s=JOINED_S)
        ended(both, one())


@pytest.mark.slow
def test_a_link_that_never_comes_back_costs_one_node(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    both = cluster(*RUN, *ELASTIC)
    with hosts(2, tmp_path) as on:
        begun(both, on)
        cut_at = time.time()
        on[0].down()
        both.wait_for_step(world_size=1, after=cut_at + 5.0, within_s=LOST_S)
        ended(both, one())  # the node that has waited says how the run has ended


@pytest.mark.slow
def test_between_two_of_three_nodes_the_largest_part_goes_on(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    three = cluster(*RUN, *ELASTIC, "launch.nnodes=1:3")
    with hosts(3, tmp_path) as on:
        begun(three, on)
        cut_at = time.time()
        cut("a pair", on[0], on[1])
        three.wait_for_step(world_size=2, after=cut_at + 5.0, within_s=LOST_S)
        assert "node2 cannot be reached from node1" in three.nodes[0].output.read_text()
        mended_at = time.time()
        mend("a pair", on[0])
        three.wait_for_step(world_size=3, after=mended_at, within_s=JOINED_S)
        ended(three, one())


@pytest.mark.slow
def test_a_link_that_is_slow_or_loses_packets_costs_nothing(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    both = cluster(*RUN, *ELASTIC, "launch.nnodes=2", "launch.max_restarts=0")
    with hosts(2, tmp_path) as on:
        begun(both, on)
        on[0].lose(0.03)
        on[1].lose(0.03)
        ended(both, one())
        assert "round 2" not in both.nodes[0].output.read_text()


@pytest.mark.slow
def test_nodes_that_never_reach_each_other_are_named(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    both = cluster(*RUN, *ELASTIC, "launch.nnodes=2", "launch.timeout_s=12")
    with hosts(2, tmp_path) as on:
        on[1].down()
        for host in on:
            both.start(before=host.enter)
        found = [node.end() for node in both.nodes]
    assert [end.code for end in found] == [1, 1]
    for end in found:
        assert re.search(r"the run has failed: .* node[12] cannot be reached from node[12] \(10\.77\.0\.[12]", end.output), (
            end.output
        )


NAMES: dict[str, Callable[[int], str]] = {
    "the name is on loopback, as Debian has it": lambda number: "127.0.1.1",
    "the name means nothing": lambda number: "",
    "the name is of a network that others do not reach": lambda number: "172.17.0.1",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", slow_but([*NAMES][:1], [*NAMES]))
def test_the_interface_that_reaches_the_others_is_found(what: str, cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    both = cluster(*RUN, *ELASTIC, "launch.nnodes=2", "launch.max_restarts=0")
    with hosts(2, tmp_path, name=NAMES[what]) as on:
        for host in on:
            host.add_network("172.17.0.1")  # as a container's bridge: on each host the same
        begun(both, on)
        ended(both, one())
        assert "round 2" not in both.nodes[0].output.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("what", [*NAMES])
def test_under_torchrun_too(what: str, tmp_path: Path) -> None:
    with hosts(2, tmp_path, name=NAMES[what]) as on:
        for host in on:
            host.add_network("172.17.0.1")
        line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--master-addr={on[0].address}",
                "--master-port=29400", str(ROOT / "train.py"), *RUN, "parallel=ddp", f"run.root={tmp_path / 'runs'}"]  # fmt: skip
        nodes = [subprocess.Popen([*line[:5], f"--node-rank={number}", *line[5:]], preexec_fn=host.enter, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                 for number, host in enumerate(on)]  # fmt: skip
        try:
            outputs = [node.communicate(timeout=120)[0] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert_close(Ended(0, outputs[0], tmp_path / "runs"), one())


@pytest.mark.slow
def test_behind_a_firewall_the_nodes_meet_on_the_ports_that_are_open(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    both = cluster(*RUN, *ELASTIC, "launch.nnodes=2", "launch.max_restarts=0", "launch.ports=40000-40199")
    with hosts(2, tmp_path) as on:
        for host in on:
            host.allow_only(40000, 40199)
        begun(both, on)
        ended(both, one())


@pytest.mark.slow
def test_an_interface_that_only_this_host_reaches_is_refused_with_the_line_to_add(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    both = cluster(*RUN, *ELASTIC, "launch.nnodes=2")
    with hosts(2, tmp_path) as on:
        for host in on:
            both.start(before=lambda host=host: (host.enter(), os.environ.update(GLOO_SOCKET_IFNAME="lo"))[0])
        found = [node.end() for node in both.nodes]
    assert [end.code for end in found] == [78, 78], found[0].output
    expected = "launch.nnodes: GLOO_SOCKET_IFNAME=lo belongs to ... alone, and ... is another host (GLOO_SOCKET_IFNAME=eth0)"
    assert any(line == Says(expected) for line in (found[0].output + found[1].output).splitlines()), found[0].output


@needs_fuse
@pytest.mark.slow
def test_where_locks_end_at_a_machine_and_files_look_old_the_nodes_agree(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """As on NFS without its locks: attributes and names are up to 3 s old. A node is killed, and comes back."""
    both = cluster(*RUN, *ELASTIC)
    both.root.mkdir()
    with hosts(2, tmp_path) as on:
        for host in on:
            host.mounts.append(lambda: mount_remote(both.root, cached_s=3))
        begun(both, on)
        killed_at = time.time()
        both.nodes[0].kill()
        both.wait_for_step(world_size=1, after=killed_at, within_s=LOST_S + 10)
        back_at = time.time()
        both.start(before=on[0].enter)
        both.wait_for_step(world_size=2, after=back_at, within_s=JOINED_S + 10)
        both.nodes.pop(0)
        ended(both, one())


# --- a rank that hangs


def at_step(step: int, act: Callable[[], object], *, on_rank: int | None) -> Callable[[], None]:
    """Have a rank, or all, do something after a step instead of going on."""

    def plant() -> None:
        original = Trainer.train_step

        def train_step(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            if trainer.progress.step == step and on_rank in (None, trainer.world.rank):
                act()
            return original(trainer, *args, **kwargs)

        Trainer.train_step = train_step  # type: ignore[method-assign]

    return plant


HANGS: dict[str, tuple[Callable[[], object], int | None, list[str]]] = {
    "stopped": (stop, 1, ["rank 1 hangs: it is stopped", "no rank of this node hangs", "rank 0"]),
    "sleeping": (sleep, 1, ["rank 1 hangs: it waits, but not for the other ranks", "rank 0"]),
    "looping": (loop, 0, ["rank 0 hangs: it computes", "rank 1"]),
    "all sleeping": (sleep, None, ["rank 0 hangs: it waits, but not", "rank 1 hangs: it waits, but not"]),
    "all stopped": (stop, None, ["rank 0 hangs: it is stopped", "rank 1 hangs: it is stopped"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", [*HANGS])
def test_the_guilty_rank_is_named_wherever_it_is(what: str, cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    act, rank, said = HANGS[what]
    both = cluster(*RUN, *ELASTIC, "launch.nnodes=2", "launch.timeout_s=20", "checkpoint.every=10")
    with hosts(2, tmp_path) as on:
        begun(both, on, before=at_step(20, act, on_rank=rank))
        found = [node.end(timeout_s=90) for node in both.nodes]
    assert [end.code for end in found] == [71, 71], found[0].output + found[1].output
    for text in (found[0].output, found[1].output, str(found[0].summary["error"])):
        assert all(words in text for words in said), text
    assert found[0].summary["status"] == "failed"
    assert_no_trace(both)


@pytest.mark.slow
def test_where_a_frozen_node_is_missed_it_is_named(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    both = cluster(*RUN, *ELASTIC, "launch.nnodes=2", "launch.timeout_s=12")
    with hosts(2, tmp_path) as on:
        begun(both, on)
        frozen = [psutil.Process(both.nodes[1].pid), *psutil.Process(both.nodes[1].pid).children(recursive=True)]
        for process in frozen:
            process.suspend()
        ended = both.nodes[0].end(timeout_s=60)
        assert ended.code == 1 and "node2, with rank 1, was lost" in ended.output, ended.output
        assert "node2, with rank 1, was lost" in ended.summary["error"]
