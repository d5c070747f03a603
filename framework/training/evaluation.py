"""The measurement of every sample of a split, once: the sums of each rank, and their totals."""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.seam import Step
from framework.engine.sums import Sums, add
from framework.modules import structure
from framework.modules.tensors import WIDEST


def measure(engine: Engine, steps: Iterable[Step]) -> Sums:
    """Return this rank's sums over a whole split, in float64: the loss and the task's metrics. Collective.

    After `totals` has added them over the ranks, they count each sample once.
    """
    engine.sync_buffers()
    sums: Sums = {}
    in_training = getattr(engine.forward.task, "evaluates_in_training_mode", False)
    with nullcontext() if in_training else structure.in_eval_mode(engine.module):
        for step in steps:
            add(sums, {name: value.to(WIDEST[value.device.type]) for name, value in engine.evaluate(step).items()})
    return sums


def measured_by_task(engine: Engine) -> dict[str, float]:
    """Return what the task itself measures of the split that `measure` has just measured. Collective."""
    measured = getattr(engine.forward.task, "measured", None)
    if measured is None:
        return {}
    with structure.in_eval_mode(engine.module), torch.no_grad():
        return dict(measured(engine))


def totals(sums: Sums, *, world: World) -> Sums:
    """Return the ranks' sums, of any shapes, added up in float64 and on the CPU. Collective, in one message.

    It waits only once for each device.
    """
    mine: dict[str, Tensor] = {}
    for device in {value.device for value in sums.values()}:
        there = {name: value for name, value in sums.items() if value.device == device}
        flat = torch.cat([value.to(WIDEST[device.type]).reshape(-1) for value in there.values()]).cpu().double()
        mine |= zip(there, flat.split([value.numel() for value in there.values()]))
    total = world.agreement.sum(torch.cat([mine[name] for name in sums]))
    parts = total.split([value.numel() for value in sums.values()])
    return {name: part.reshape(value.shape) for (name, value), part in zip(sums.items(), parts)}
