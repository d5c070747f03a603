"""The process groups of a world: stores, groups of their own, meshes, and what happens at the end."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from framework.distributed import groups, world
from framework.distributed.groups import attempt_store, connect_store, hang_up, serve_store
from framework.distributed.world import World
from framework.runtime.environment import Environment
from tests.ranks import on_ranks


def test_a_store_has_keys_of_its_own(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        one, other = world.groups.store("one"), world.groups.store("other")
        if world.rank == 0:
            one.set("key", "of one")
            other.set("key", "of the other")
        return one.get("key"), other.get("key")

    assert on_ranks(2, act, scratch=tmp_path) == [(b"of one", b"of the other")] * 2


def test_a_new_group_spans_all_ranks_and_is_not_the_default(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        group = world.groups.new_group()
        value = torch.tensor(float(world.rank))
        dist.all_reduce(value, group=group)
        return group.size(), group is not dist.group.WORLD, value.item()

    assert on_ranks(3, act, scratch=tmp_path) == [(3, True, 3.0)] * 3


def print_sockets(num_ranks: int, scratch: str) -> None:
    """Print how many sockets each rank has: at first, with more groups, and when the ranks have agreed on something."""

    def sockets() -> int:
        found = 0
        for file in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # gone, when it is asked what it is
                found += file.readlink().name.startswith("socket:")
        return found

    def act(world: World) -> list[int]:
        counts = [sockets()]
        world.groups.new_group()
        world.with_own_agreement()
        counts.append(sockets())
        for _ in range(3):
            world.agreement.distinct("the same")
            world.agreement.from_rank_0("text")
            world.agreement.any_flags(False)
            world.agreement.finish()
        return [*counts, sockets()]

    print(json.dumps(on_ranks(num_ranks, act, scratch=Path(scratch))))


@pytest.mark.slow
def test_a_rank_connects_to_the_ranks_that_it_speaks_to_and_to_no_others(tmp_path: Path) -> None:
    num_ranks = 16
    # a process of its own: gloo asks for the variable once, when a process makes its first group
    program = f"from tests.distributed.test_groups import print_sockets; print_sockets({num_ranks}, {str(tmp_path)!r})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for start, after_groups, after_words in json.loads(ended.stdout):
        assert after_groups - start <= 4  # each group would have num_ranks - 1
        # reductions go round a ring, and broadcasts down a tree: as many as doublings of the ranks, to it and from it
        assert after_words - start <= 4 + 2 + 2 * math.log2(num_ranks)


def test_nccl_is_given_the_device_of_a_process_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.append((backend, options["device_id"])))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(groups, "set_group_timeout", lambda timeout: None)
    for backend, num_devices in (("auto", 1), ("gloo", 1), ("auto", 2)):
        devices = [torch.device("cuda", index) for index in range(num_devices)]
        monkeypatch.setattr(world, "devices_of", lambda place, devices=devices, **options: devices)
        started = World.start(Environment(), backend=backend, timeout_s=5.0, scratch=None, device="cuda")
        started.groups.join(dist.HashStore())
    assert given == [
        ("cpu:gloo,cuda:nccl", torch.device("cuda", 0)),
        ("cpu:gloo,cuda:gloo", None),
        ("cpu:gloo,cuda:nccl", None),
    ]


def test_between_nodes_the_ranks_meet_in_the_launchers_store_and_not_in_files(tmp_path: Path) -> None:
    served, port = serve_store("127.0.0.1")
    place = Environment(world_size=2, uses_agent_store=True, master_addr="127.0.0.1", master_port=port, attempt=1)
    one, other = (attempt_store(place, scratch=tmp_path, timeout=timedelta(seconds=5)) for _ in range(2))
    one.set("key", "value")
    assert other.get("key") == b"value" and list(tmp_path.iterdir()) == []
    again = attempt_store(replace(place, attempt=2), scratch=tmp_path, timeout=timedelta(seconds=5))
    assert not again.check(["key"])  # of a failed attempt
    del served


def test_a_request_to_a_store_that_does_not_answer_ends_when_the_store_is_given_up() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def serve() -> None:
        served, port = serve_store("127.0.0.1")
        theirs.send(port)
        signal.pause()
        del served

    process = context.Process(target=serve, daemon=True)
    process.start()
    try:
        store = connect_store("127.0.0.1", port := ours.recv(), silent_s=60)
        os.kill(process.pid or 0, signal.SIGSTOP)
        ended = threading.Event()

        def ask() -> None:
            with suppress(RuntimeError):
                store.get("key")
            ended.set()

        threading.Thread(target=ask, daemon=True).start()
        assert not ended.wait(1)
        hang_up(port)
        assert ended.wait(20)
    finally:
        process.kill()


def test_a_mesh_lays_the_ranks_out_with_the_last_axis_fastest(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        mesh = world.mesh(replicate=None, shard=2)
        return mesh.mesh_dim_names, list(mesh.get_coordinate() or [])

    names = ("replicate", "shard")
    assert on_ranks(4, act, scratch=tmp_path) == [(names, [0, 0]), (names, [0, 1]), (names, [1, 0]), (names, [1, 1])]


def test_a_broadcast_overwrites_the_tensors_by_rank_0s(tmp_path: Path) -> None:
    def act(world: World) -> Any:
        tensors = [torch.full((2,), float(world.rank)), torch.tensor(world.rank + 10)]
        world.broadcast(tensors)
        return [tensor.tolist() for tensor in tensors]

    assert on_ranks(3, act, scratch=tmp_path) == [[[0.0, 0.0], 10]] * 3


@pytest.mark.parametrize(("end", "expected"), [("leave", ["leave second", "leave first"]),
                                               ("abandon", ["abandon second", "abandon first"])])  # fmt: skip
def test_what_was_registered_last_ends_first_and_once(end: str, expected: list[str]) -> None:
    groups = World.start(Environment(), backend="gloo", timeout_s=5.0, scratch=None).groups
    calls: list[str] = []
    for name in ("first", "second"):
        groups.at_end(
            leave=lambda name=name: calls.append(f"leave {name}"), abandon=lambda name=name: calls.append(f"abandon {name}")
        )
    getattr(groups, end)()
    groups.leave()
    groups.abandon()
    assert calls == expected
