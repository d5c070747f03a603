"""FSDP2 over tensor parallelism: layers cut within a group of processes, and those parts sharded across the groups."""

import logging
import warnings
from typing import Literal

from torch import nn

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.parallel import fsdp
from framework.parallel import tensor as tensors


def fsdp_tensor(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    shard: int | None,
    tensor: int | None,
    sequence: bool,
    reshard_after_forward: bool,
    param_dtype: Literal["bf16", "fp16", "fp32"] | None,
    reduce_dtype: Literal["bf16", "fp16", "fp32"] | None,
) -> Engine:
    """Cut the linear layers over the inner axis of the mesh, then shard everything over the outer. Collective."""
    ignore_known()
    model.to(world.device)
    mesh = world.mesh(shard=shard, tensor=tensor)
    tensors.cut_layers(model, mesh=mesh["tensor"], sequence=sequence)
    return fsdp.sharded(
        model,
        mesh=mesh,
        world=world,
        forward=forward,
        reshard_after_forward=reshard_after_forward,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )


def problems(model: nn.Module, *, tensor: int, sequence: bool, **others: object) -> list[str]:
    """Say why this model cannot be cut and sharded so."""
    return tensors.problems(model, tensor=tensor, sequence=sequence) or fsdp.problems(model)


def ignore_known() -> None:
    """Silence what torch says of shards over two axes each time, on every rank."""
    # a gathered output is a view of a DTensor; nobody changes it in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    # a norm is summed over one axis, then over the other: all processes do so in the same order
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
