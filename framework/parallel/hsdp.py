"""HSDP: a group of processes (a node) holds the shards; the groups are replicas of each other."""

from torch import nn
from typing_extensions import Unpack

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.parallel.first_weights import fills
from framework.parallel.fsdp import REMEDIES, Offloading, exact_options, problems, sharded, typed

__all__ = ["REMEDIES", "exact_options", "hsdp", "problems"]  # the model is sharded as in `fsdp`


@fills
def hsdp(
    model: nn.Module, *, world: World, forward: Forward, replicate: int | None, shard: int | None, **options: Unpack[Offloading]
) -> Engine:
    """Shard the model over the inner axis of the mesh, and replicate it over the outer axis. Collective."""
    mesh = world.mesh(replicate=replicate, shard=shard)
    return sharded(model, mesh=mesh, world=world, forward=forward, **typed(model, forward, options))
