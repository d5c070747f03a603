"""A rank of a world without other processes, in which a run's strategy can be built."""

from dataclasses import fields
from typing import Any

import torch.distributed as dist

from framework.build.training import Builder
from framework.distributed.groups import Groups
from framework.distributed.world import World
from framework.runtime.torch_internals import register_fake_backend


def planned_world(build: Builder, *, rank: int, kind: type[World] = World) -> World:
    """Become a rank of the run's world, on the CPU. Its collectives return immediately and move nothing.

    Use it only in a separate process that ends afterwards, because the process joins torch's default group.
    """
    alone, launch = World.alone(), build.config.launch
    register_fake_backend()
    groups = _WithoutOthers("fake", rank=rank, world_size=launch.most_processes, timeout=alone.timeout)
    groups.join(dist.HashStore())
    known: dict[str, Any] = {field.name: getattr(alone, field.name) for field in fields(World)}
    known |= {"rank": rank, "world_size": launch.most_processes, "local_world_size": launch.num_processes, "groups": groups}
    return kind(**(known | {"local_rank": rank % launch.num_processes}))


class _WithoutOthers(Groups):
    """The groups of a rank without other ranks. A strategy that waits for an answer outside a collective cannot be built."""

    def store(self, name: str) -> dist.Store:
        raise ValueError(f"its processes communicate through a store ({name}), not in collectives")
