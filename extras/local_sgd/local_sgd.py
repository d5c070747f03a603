"""Post-local SGD: each process trains alone, and all processes average their models at intervals. NOT equal to one process."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from extras.local_sgd.averaged_states import average_states
from framework.distributed.buckets import sum_all
from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.engine.seam import Demands
from framework.parallel.replica import sum_gradients


def local_sgd(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    sync_every: Annotated[int, Ge(1)],
    sync_first: Annotated[int, Ge(0)],
) -> Engine:
    """Replicate the model. Collective."""
    averaging = Averaging(world, sync_every=sync_every, sync_first=sync_first)
    return replicas(model, world=world, forward=forward, replicate=replicate, parts={"average": averaging}, first=sync_first)


def replicas(
    model: nn.Module, *, world: World, forward: Forward, replicate: int | None, first: int, parts: Mapping[str, Any]
) -> Engine:
    """Return the Engine of processes that train alone after the `first` steps, and that `parts` average. Collective."""
    mesh = world.mesh(replicate=replicate)
    model.to(world.device)
    return Engine(
        module=model,
        forward=forward,
        mesh=mesh,
        dp_rank=world.rank,
        dp_size=world.world_size,
        broadcast=world.broadcast,
        meet_in_steps=False,
        finish=partial(sum_gradients, [p for p in nn.Module.parameters(model) if p.requires_grad]),
        alone=lambda index: index >= first,
        parts=parts,
    )


def problems(model: nn.Module, *, demands: Demands, sync_every: int, **others: object) -> list[str]:
    """Refuse evaluations and checkpoints at steps without an average, and parts, because a part sees every step."""
    if demands.turns:
        return ["optimizer.turns: several optimizers cannot be averaged as one (parallel=ddp, zero or fsdp)"]
    if demands.parts:
        what = "but between two averages each process has different weights"
        return [f"part: {', '.join(demands.parts)}, {what} (part=none, or parallel=ddp)"]
    periods = {"trainer.eval_every": demands.eval_every, "checkpoint.every": demands.checkpoint_every}
    return [f"{key}: {every} is not a multiple of parallel.sync_every={sync_every} (the processes agree only then)"
            for key, every in periods.items() if isinstance(every, str) or (every or 0) % sync_every]  # fmt: skip


def exact_options(**options: object) -> None:
    """Return None: this strategy has no options with which it computes the same as one process."""


class Averaging:
    """A part of the loop that lets all processes average their models.

    After every `sync_every`-th step, and after the last step, the processes average the parameters, their moving average and
    the optimizer state. All processes are then equal. Only then can a checkpoint be saved.
    Source: Lin et al. 2020, "Don't use large mini-batches, use local SGD"; averaged momentum: Yu et al. 2019.
    """

    def __init__(self, world: World, *, sync_every: int, sync_first: int) -> None:
        self._world, self.sync_every, self.sync_first = world, sync_every, sync_first

    def is_due(self, loop: Any) -> bool:
        """Return whether this step ends with an average. The first steps do not: rounding would change the equal processes."""
        return loop.step > self.sync_first and (loop.step % self.sync_every == 0 or loop.step >= loop.total_steps)

    def can_save(self, loop: Any) -> bool:
        return loop.step <= self.sync_first or self.is_due(loop)

    def step_taken(self, loop: Any) -> None:
        if self.is_due(loop):
            trained = [*loop.trained().values()]
            self._average(loop.averaged().values())
            self._average(parameter.data for parameter in trained)
            agreement, num_ranks = self._world.agreement, self._world.world_size
            average_states(loop.optimizer, trained, agreement=agreement, num_ranks=num_ranks)

    @torch.no_grad()
    def _average(self, tensors: Iterable[Tensor]) -> None:
        averaged = list(tensors)
        sum_all(averaged)
        for tensor in averaged:
            tensor.div_(self._world.world_size)
