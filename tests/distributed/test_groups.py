"""The process groups of a world: stores, groups of their own, meshes, and what happens at the end."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

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
        )  # type: ignore[misc]
    getattr(groups, end)()
    groups.leave()
    groups.abandon()
    assert calls == expected
