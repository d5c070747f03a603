"""FSDP2 over tensor parallelism: a group of processes cuts the layers, and the parts are sharded across the groups."""

import logging
import warnings
from typing import Any

from torch import nn
from typing_extensions import Unpack

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.parallel import fsdp
from framework.parallel import tensor as tensors
from framework.parallel.first_weights import fills
from framework.parallel.vocabulary import stays_cut
from framework.runtime.torch_internals import REDISTRIBUTION_LOG


@fills
def fsdp_tensor(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    shard: int | None,
    tensor: int | None,
    sequence: bool | None,
    **options: Unpack[fsdp.ShardOptions],
) -> Engine:
    """Cut the linear layers over the inner axis of the mesh, then shard everything over the outer axis. Collective."""
    ignore_known()
    mesh = world.mesh(shard=shard, tensor=tensor)
    given = fsdp.typed(model, forward, options)
    # FSDP shards only parts of equal size
    tensors.cut_layers(model, mesh=mesh["tensor"], sequence=sequence, keeps_cut=stays_cut(forward.task), evenly=True)
    return fsdp.sharded(model, mesh=mesh, world=world, forward=forward, **given)


def problems(model: nn.Module, *, tensor: int, sequence: bool | None, **others: Any) -> list[str]:
    """Return why this model cannot be cut and sharded in this way."""
    return tensors.problems(model, tensor=tensor, sequence=sequence) or fsdp.problems(model, **others)


exact_options, REMEDIES = fsdp.exact_options, fsdp.REMEDIES  # the model is sharded as in `fsdp`


def ignore_known() -> None:
    """Silence, on every rank, the warnings that torch prints for all shards over two axes."""
    # a gathered output is a view of a DTensor; no code changes it in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    # a norm is summed over one axis, then over the other; all processes use the same order
    logging.getLogger(REDISTRIBUTION_LOG).setLevel(logging.ERROR)
