"""FSDP2: parameters, gradients and optimizer state sharded over the processes."""

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from framework.engine import DataParallelEngine, Engine, Forward
from framework.modules import blocks_of
from framework.world import World


def fsdp(
    model: nn.Module, *, world: World, forward: Forward, shard: int | None, reshard_after_forward: bool
) -> Engine:
    """Shard the model, block by block: one block's parameters are gathered at a time. Collective."""
    model.to(world.device)  # every rank has built the same full weights: sharding only drops what others keep
    mesh = world.mesh(shard=shard)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    assert isinstance(model, FSDPModule)

    return DataParallelEngine(
        model,
        model=model,
        forward=forward,
        mesh=mesh,
        dp_rank=mesh.get_local_rank(),
        dp_size=mesh.size(),
        set_sync=model.set_requires_gradient_sync,
        broadcast=world.broadcast,
    )
