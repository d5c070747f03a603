"""HSDP: shards within a group of processes (a node), replicas of them across groups."""

from typing import Literal

from torch import nn

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.parallel.fsdp import problems, sharded

__all__ = ["hsdp", "problems"]  # it is sharded as in `fsdp`


def hsdp(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    shard: int | None,
    reshard_after_forward: bool,
    param_dtype: Literal["bf16", "fp16", "fp32"] | None,
    reduce_dtype: Literal["bf16", "fp16", "fp32"] | None,
    cpu_offload: bool,
) -> Engine:
    """Shard the model over the inner axis of the mesh and replicate it over the outer. Collective."""
    return sharded(
        model,
        mesh=world.mesh(replicate=replicate, shard=shard),
        world=world,
        forward=forward,
        reshard_after_forward=reshard_after_forward,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cpu_offload=cpu_offload,
    )
