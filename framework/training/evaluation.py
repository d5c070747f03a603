"""Evaluations: those that are due after a step, and the measurement of every sample of a split, once."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from framework.data.source import Split
from framework.distributed.world import World
from framework.engine.buffers import Buffers
from framework.engine.engine import Engine
from framework.engine.seam import Step
from framework.engine.sums import Sums, add, weight_of
from framework.modules import structure
from framework.modules.tensors import WIDEST
from framework.runtime.exits import Diverged, Interrupted


class DueEvaluations:
    """The evaluations of the last step that have not been made: a stop may break them off, and a checkpoint holds them.

    The buffers are then those from before the evaluation, which is made again as a whole.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.left: list[Split] = []
        self._buffers = buffers

    def finish(self, make: Callable[..., None], *, may_stop: bool, is_over: Callable[[], bool]) -> None:
        """Make the evaluations, and the test if the run is over then. After a stop, some are left. Collective."""
        while self.left:
            split, before = self.left[0], self._buffers.values() if may_stop else []
            try:
                make(split, may_stop=may_stop)
            except Interrupted:
                self._buffers.set(before)
                return
            del self.left[0]
            if not self.left and split != "test" and is_over():
                self.left = ["test"]


def until_asked(steps: Iterable[Step], is_asked: Callable[[], bool]) -> Iterator[Step]:
    """Yield the batches; raise Interrupted before the first batch at which `is_asked` says so, on all ranks."""
    for step in steps:
        if is_asked():
            raise Interrupted("stopped; nothing was written")
        yield step


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


def require_finite(loss: float, sums: Sums, *, what: str) -> None:
    """Raise Diverged if the mean loss of a split is not finite; `sums` are those that it was computed from."""
    if not math.isfinite(loss):
        remark = ", or no target has a weight" if weight_of("loss") in sums else ""
        raise Diverged(f"{what} is not finite{remark}")


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
