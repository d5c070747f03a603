"""Gossip: local SGD in which each process averages its weights with one other process per step. NOT equal to one process."""

from typing import Annotated, Any

import torch
import torch.distributed as dist
from annotated_types import Ge
from torch import Tensor, nn

from extras.local_sgd import local_sgd
from framework.distributed.buckets import buckets_of
from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.forward import Forward

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
    averaging = local_sgd.Averaging(world, sync_every=sync_every, sync_first=sync_first)
    parts = {"average": Mixing(averaging, world)}
    return local_sgd.replicas(model, world=world, forward=forward, replicate=replicate, parts=parts, first=sync_first)


class Mixing:
    """A part around local SGD's: between the averages over all processes, each step ends with an average over two processes.

    A process sends its parameters to one partner and receives those of another: two messages a step for any number of
    processes. The distance to the partner goes through the powers of two. So after log2(processes) steps each process has a
    share of the weights of every other process. The mean over the processes does not change. Each process keeps its own
    optimizer state until all processes average.
    Source: Daily et al. 2018, "GossipGraD: scalable deep learning using gossip communication based asynchronous gradient
    descent" (without its rotation of the samples: here the step decides which samples a process has).
    """

    def __init__(self, averaging: local_sgd.Averaging, world: World) -> None:
        self._averaging, self._world = averaging, world
        self.can_save = averaging.can_save

    def step_taken(self, loop: Any) -> None:
        if self.can_save(loop):
            self._averaging.step_taken(loop)
        elif self._world.world_size > 1:
            self._mix([p.data for p in loop.trained().values()], distance(loop.step, num_ranks=self._world.world_size))

    @torch.no_grad()
    def _mix(self, parameters: list[Tensor], distance: int) -> None:
        rank, size = self._world.rank, self._world.world_size
        to, source = (rank + distance) % size, (rank - distance) % size
        for bucket in buckets_of(parameters):
            sent = torch.cat([tensor.reshape(-1) for tensor in bucket])
            sent = sent.cpu() if "cuda:gloo" in self._world.groups.backend else sent  # gloo sends CUDA tensors only to all
            received = torch.empty_like(sent)
            both = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            for tensor, part in zip(bucket, received.add_(sent).div_(2).split([tensor.numel() for tensor in bucket])):
                tensor.copy_(part.view(tensor.shape))


def distance(step: int, *, num_ranks: int) -> int:
    """Return the distance to the partner after this step: the powers of two below `num_ranks`, in a cycle."""
    num_distances = max(1, (num_ranks - 1).bit_length())
    return 2 ** ((step - 1) % num_distances)
