"""The distribution of an optimizer's work on whole matrices over the ranks."""

import torch
from torch import Tensor

from framework.distributed.buckets import broadcast_all
from framework.distributed.world import World
from framework.optim.optimizers import BuildOptimizer, MakeOptimizer, Trainable
from framework.optim.turns import InTurns


def dealing(world: World) -> MakeOptimizer:
    """Return a function that builds an optimizer; if it can `deal` (Muon), each rank works on its share of the matrices.

    For strategies in which every rank holds or gathers whole matrices.
    """

    def exchange(matrices: list[Tensor]) -> None:
        broadcast_all({rank: [matrix] for rank, matrix in enumerate(matrices)})

    def make_optimizer(build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        optimizer = build(trained)
        for part in optimizer.optimizers.values() if isinstance(optimizer, InTurns) else [optimizer]:
            if (deal := getattr(part, "deal", None)) is not None and world.world_size > 1:
                deal(exchange, rank=world.rank, num_ranks=world.world_size)
        return optimizer

    return make_optimizer
