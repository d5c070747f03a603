"""Gossip: local SGD in which each process averages its weights with one other process per step. NOT equal to one process."""

from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Ge
from torch import nn

from framework.distributed.buckets import buckets_of
from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Engine, EngineAround
from framework.parallel import local_sgd
from framework.runtime.torch_internals import copy_all

exact_options = local_sgd.exact_options
problems = local_sgd.problems


def gossip(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    sync_every: Annotated[int, Ge(1)],
    sync_first: Annotated[int, Ge(0)],
) -> Engine:
    """Replicate the model. Collective."""
    inner = local_sgd.local_sgd(
        model, world=world, forward=forward, replicate=replicate, sync_every=sync_every, sync_first=sync_first
    )
    return Gossip(inner, world=world)


class Gossip(EngineAround):
    """An Engine around local SGD's: between the averages over all processes, each step ends with an average over two processes.

    A process sends its parameters to one partner and receives those of another: two messages a step for any number of
    processes. The distance to the partner goes through the powers of two. So after log2(processes) steps each process has a
    share of the weights of every other process. The mean over the processes does not change. Each process keeps its own
    optimizer state until all processes average.
    Source: Daily et al. 2018, "GossipGraD: scalable deep learning using gossip communication based asynchronous gradient
    descent" (without its rotation of the samples: here the step decides which samples a process has).
    """

    def __init__(self, engine: Engine, *, world: World) -> None:
        super().__init__(engine)
        self._world = world
        self._parameters = [p for p in nn.Module.parameters(self.module) if p.requires_grad]

    def meet(self, step: int, *, is_last: bool) -> bool:
        have_met = self._engine.meet(step, is_last=is_last)
        if not have_met and self.dp_size > 1:
            self._mix(distance(step, num_ranks=self.dp_size))
        return have_met

    @torch.no_grad()
    def _mix(self, distance: int) -> None:
        rank, size = self.dp_rank, self.dp_size
        to, source = (rank + distance) % size, (rank - distance) % size
        for bucket in buckets_of(p.data for p in self._parameters):
            sent = torch.cat([tensor.reshape(-1) for tensor in bucket])
            received = torch.empty_like(sent)
            both = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            parts = received.add_(sent).div_(2).split([tensor.numel() for tensor in bucket])
            copy_all(bucket, [part.view(tensor.shape) for part, tensor in zip(parts, bucket)])


def distance(step: int, *, num_ranks: int) -> int:
    """Return the distance to the partner after this step: the powers of two below `num_ranks`, in a cycle."""
    num_distances = max(1, (num_ranks - 1).bit_length())
    return 2 ** ((step - 1) % num_distances)
