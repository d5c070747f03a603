"""Elastic runs on hosts of their own: links that are cut, and names that mean nothing to other hosts."""

import itertools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from framework.checkpoint.store import CheckpointStore
from framework.training.loop import Trainer
from tests.harness import Ended, assert_close, before_each, exact_rows, once, wait_for
from tests.hosts import Host, hosts, needs_hosts
from tests.launch import test_elastic
from tests.launch.test_elastic import ELASTIC, JOINED_S, LOST_S, RUN, Cluster, Node, assert_no_trace, wait_for_store

pytestmark = [needs_hosts, pytest.mark.timeout(300)]
cluster = test_elastic.cluster
WAITING_S = "1"  # of a step while another node is to join: the first must not end before, beside three other tests on two cores


def one() -> Ended:
    return once(*RUN)


def begun(cluster: Cluster, on: list[Host], *, before: Callable[[], None] = lambda: None) -> None:
    """Start a node on each host, in their order, and wait for a step of all. The first one serves the store."""
    began = time.time()
    cluster.slow.write_text(WAITING_S)
    for host in on:
        cluster.start(before=lambda host=host: (host.enter(), before())[0])
        wait_for_store(cluster)
    cluster.wait_for_step(world_size=len(on), after=began, within_s=180)
    cluster.slow.write_text("")


def ended(cluster: Cluster, reference: Ended, *, lost: Sequence[Node] = ()) -> None:
    """Let all nodes end, and compare what they have computed."""
    cluster.finish()
    found = [node.end(timeout_s=120) for node in cluster.nodes if node not in lost]
    assert [end.code for end in found] == [0] * len(found), "\n".join(end.output[-3000:] for end in found)
    assert_close(found[0], reference)
    steps = [row["step"] for row in exact_rows(found[0]) if row["split"] == "train"]
    assert len(steps) == len(set(steps)), "each row once"
    assert_no_trace(cluster)


def waits_at(folder: Path, owner: Any, name: str, condition: Callable[..., bool]) -> Callable[[], None]:
    """Have every rank of several say, in `folder`/there, that it has come to a call, and wait there until `folder`/cut exists."""

    def wait(*args: Any, **kwargs: Any) -> None:
        all_there = dist.is_initialized() and dist.get_world_size() > 1  # the first node may be far before the second joins
        if all_there and condition(*args, **kwargs) and not (folder / "cut").exists():
            (folder / "there").touch()
            wait_for((folder / "cut").exists, what="the cut")

    return lambda: before_each(owner, name, wait)


MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "training": (Trainer, "train_step", lambda trainer, *_, **__: trainer.progress.step >= 30),
    "saving": (CheckpointStore, "_write", lambda store, staging, tensors: True),
    "committing": (CheckpointStore, "_commit", lambda store, staging, *_: True),
    "evaluation": (Trainer, "evaluate", lambda trainer, split, **_: True),
}
CASES = [*zip(MOMENTS, itertools.cycle(["link", "one way"]))]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]} in {case[0]}")
def test_a_node_that_is_cut_off_from_the_store_ends_and_the_others_go_on_without_it(
    case: tuple[str, str], cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """The files are on another network, which is not cut; all settings are the defaults. The command is given again later."""
    moment, how = case
    both = cluster(*RUN, *ELASTIC, "checkpoint.every=20")
    with hosts(2, tmp_path) as on:
        begun(both, on, before=waits_at(tmp_path, *MOMENTS[moment]))
        wait_for((tmp_path / "there").exists, what=moment)
        both.slow.write_text(WAITING_S)
        cut_at = time.time()
        on[1].down() if how == "link" else on[1].drop()
        (tmp_path / "cut").touch()
        lost_s = both.wait_for_step(world_size=1, after=cut_at + 5.0, within_s=LOST_S) + 5.0
        print(f"{how} cut in {moment}: {lost_s:.1f} s")
        lost = both.nodes[1].end(timeout_s=LOST_S)
        assert lost.code == 75 and "the store of the run's nodes does not answer (node1, 10.77.0.1" in lost.output, lost.output
        on[1].up() if how == "link" else on[1].heal()
        mended_at = time.time()
        both.start(before=on[1].enter)
        both.wait_for_step(world_size=2, after=mended_at, within_s=2 * JOINED_S)  # beside three other tests, on two cores
        ended(both, one(), lost=both.nodes[1:2])


@pytest.mark.slow
def test_a_node_that_never_reaches_the_store_says_where_it_is(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    both = cluster(*RUN, *ELASTIC, "launch.timeout_s=12")
    with hosts(2, tmp_path) as on:
        on[1].down()
        both.start(before=on[0].enter)
        wait_for_store(both)
        apart = both.start(before=on[1].enter).end()
        assert apart.code == 1, apart.output
        assert re.search(r"does not answer within launch.timeout_s=12 \(node1, 10\.77\.0\.1", apart.output), apart.output
        both.finish()
        assert both.nodes[0].end().code == 0


NAMES: dict[str, Callable[[int], str]] = {
    "the name is on loopback, as Debian has it": lambda number: "127.0.1.1",
    "the name means nothing": lambda number: "",
    "the name is of a network that others do not reach": lambda number: "172.17.0.1",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", NAMES)
def test_the_interface_that_reaches_the_others_is_found(what: str, cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    both = cluster(*RUN, *ELASTIC, "launch.nnodes=2", "launch.max_restarts=0")
    with hosts(2, tmp_path, name=NAMES[what]) as on:
        for host in on:
            host.add_network("172.17.0.1")  # as a container's bridge: on each host the same
        begun(both, on)
        ended(both, one())
        assert "round 2" not in both.nodes[0].output.read_text()


@pytest.mark.slow
def test_behind_a_firewall_the_nodes_meet_on_the_ports_that_are_open(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    both = cluster(*RUN, *ELASTIC, "launch.nnodes=2", "launch.max_restarts=0")
    with hosts(2, tmp_path) as on:
        for host in on:
            host.allow_only(40000, 40199)
        begun(both, on)
        ended(both, one())
