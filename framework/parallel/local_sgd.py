"""Post-local SGD: each process trains alone, and all processes average their models at intervals. NOT equal to one process."""

from collections.abc import Iterable
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Ge
from torch import Tensor, nn

from framework.distributed.buckets import sum_all
from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import Demands, Engine, EngineAround, Step, weigh_gradients
from framework.engine.sums import Sums
from framework.optim.optimizers import BuildOptimizer, Trainable
from framework.optim.update import Average, AveragedWeights
from framework.parallel.averaged_states import average_states
from framework.parallel.ddp import sum_gradients


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
    mesh = world.mesh(replicate=replicate)
    model.to(world.device)
    plain = DataParallelEngine(
        model,
        forward=forward,
        mesh=mesh,
        dp_rank=world.rank,
        dp_size=world.world_size,
        broadcast=world.broadcast,
        meet_in_steps=False,
    )
    return LocalSGD(plain, world=world, sync_every=sync_every, sync_first=sync_first)


def problems(model: nn.Module, *, demands: Demands, sync_every: int, **others: object) -> list[str]:
    """Refuse evaluations and checkpoints at steps without an average, and parts, because a part sees every step."""
    if demands.turns:
        return ["optimizer.turns: several optimizers cannot be averaged as one (parallel=ddp, zero or fsdp)"]
    if demands.parts:
        what = "but between two averages each process has different weights"
        return [f"part: {', '.join(demands.parts)}, {what} (part=none, or parallel=ddp)"]
    periods = {"trainer.eval_every": demands.eval_every, "checkpoint.every": demands.checkpoint_every}
    return [f"{key}: {every} is not a multiple of parallel.sync_every={sync_every} (the processes agree only then)"
            for key, every in periods.items() if every is not None and every % sync_every]  # fmt: skip


def exact_options(**options: object) -> None:
    """Return None: this strategy has no options with which it computes the same as one process."""


class LocalSGD(EngineAround):
    """An Engine with gradients from this process's samples only, after the first `sync_first` steps.

    After every `sync_every`-th step, and after the last step, the processes average the parameters, their moving average and
    the optimizer state. All processes are then equal. Only then can a checkpoint be saved.
    Source: Lin et al. 2020, "Don't use large mini-batches, use local SGD"; averaged momentum: Yu et al. 2019.
    """

    def __init__(self, engine: DataParallelEngine, *, world: World, sync_every: int, sync_first: int) -> None:
        super().__init__(engine)
        self._plain, self._world = engine, world
        self._trained = [p for p in nn.Module.parameters(self.module) if p.requires_grad]
        self._sync_every = sync_every
        self._sync_first = sync_first
        self._is_local = False  # whether the latest step was local
        self._num_samples = 0  # of this rank in the latest step
        self._optimizer: torch.optim.Optimizer | None = None
        self._weights_average: AveragedWeights | None = None

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        self._num_samples = step.num_own_samples
        self._is_local = is_local = index >= self._sync_first
        if is_local:  # the mean over this process's samples, not over the global batch
            step = step._replace(num_samples=max(1, self._num_samples))
        self._plain.averaged_over = 1 if is_local else self.dp_size
        sums = self._engine.forward_backward(step, index=index, loss_scale=loss_scale, measure=measure)
        if not is_local:
            sum_gradients(self._trained)
            for parameter in self._trained:
                if parameter.grad is not None:
                    parameter.grad.div_(self.dp_size)
        return sums

    def weigh(self, sums: Sums, *, num_samples: int) -> None:
        if self._is_local:
            weigh_gradients(self.module, sums, num_samples=self._num_samples, among_ranks=False)
        else:
            self._engine.weigh(sums, num_samples=num_samples)

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip by this process's norm; return the root mean square of the norms of all processes, equal on all processes."""
        square = self._engine.clip_grad_norm(max_norm).square()
        dist.all_reduce(square)
        return (square / self.dp_size).sqrt()

    def warm_up(self, step: Step) -> None:
        pass

    def use_average(self, average: Average | None) -> None:
        self._engine.use_average(average)
        self._weights_average = average if isinstance(average, AveragedWeights) else None

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        self._optimizer = build(trained)
        return self._optimizer

    def meet(self, step: int, *, is_last: bool) -> bool:
        if step <= self._sync_first:  # the processes are equal, and rounding must not change them
            return True
        is_due = step % self._sync_every == 0 or is_last
        if is_due:  # not in the optimizer's step, which can be skipped (fp16, divergence)
            self._average_all()
        return is_due

    def _average_all(self) -> None:
        assert self._optimizer is not None
        if self._weights_average is not None:
            self._average(self._weights_average.tensors.values())
        self._average(p.data for p in self._trained)
        average_states(self._optimizer, self._trained, agreement=self._world.agreement, num_ranks=self.dp_size)

    def _average(self, tensors: Iterable[Tensor]) -> None:
        averaged = list(tensors)
        sum_all(averaged)
        for tensor in averaged:
            tensor.div_(self.dp_size)
