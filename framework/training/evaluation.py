"""Measuring a model: every sample of a split once, whatever the strategy and the world size."""

from collections.abc import Iterable

import torch

from framework.distributed.world import World
from framework.engine.data_parallel import add
from framework.engine.seam import Engine, MicroBatch, Sums


def measure(engine: Engine, micro_batches: Iterable[MicroBatch]) -> Sums:
    """Return this rank's sums over a whole split, in float64: the loss and the task's metrics. Collective.

    Added over the ranks (by `totals`), they count each sample once.
    """
    engine.sync_buffers()
    engine.module.eval()
    sums: Sums = {}
    for micro_batch in micro_batches:
        add(sums, {name: value.double() for name, value in engine.forward(micro_batch).items()})
    engine.module.train()
    return sums


def totals(sums: Sums, *, world: World) -> Sums:
    """Return the ranks' sums, of any shapes, added up in float64 and on the CPU. Collective, in one message."""
    flat = world.agreement.sum(torch.cat([value.double().reshape(-1) for value in sums.values()]).cpu())
    parts = flat.split([value.numel() for value in sums.values()])
    return {name: part.reshape(value.shape) for (name, value), part in zip(sums.items(), parts)}
