"""FSDP2 with context parallelism: all processes shard the parameters; groups of processes cut each sample's tokens."""

from typing import Any

from torch import nn
from typing_extensions import Unpack

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Demands, Engine
from framework.parallel import context as contexts
from framework.parallel import fsdp
from framework.parallel.attention.fit import Attention
from framework.parallel.first_weights import fills

exact_options, REMEDIES = fsdp.exact_options, fsdp.REMEDIES  # the model is sharded as in `fsdp`


@fills
def fsdp_context(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    shard: int | None,
    context: int | None,
    attention: Attention | None = None,
    **options: Unpack[fsdp.Offloading],
) -> Engine:
    """Cut the tokens over the inner axis of the mesh, and shard the model over both axes. Collective.

    Ranks with the same samples have gradients of different tokens. They are summed like the gradients of different samples.
    """
    mesh, everyone = world.mesh(shard=shard, context=context), world.mesh(shard=None)
    given = fsdp.typed(model, forward, options)
    cut = contexts.cut_tokens(model, forward=forward, group=mesh.get_group("context"), attention=attention)
    engine = fsdp.sharded(model, mesh=everyone, world=world, forward=forward, **given)
    return contexts.ContextEngine(engine, cut=cut, dp_rank=mesh.get_local_rank("shard"))


def problems(
    model: nn.Module, *, demands: Demands, context: int, attention: Attention | None = None, **others: Any
) -> list[str]:
    """Return why the tokens cannot be cut, or why the model cannot be sharded."""
    return contexts.problems(model, demands=demands, context=context, attention=attention) or fsdp.problems(model, **others)
