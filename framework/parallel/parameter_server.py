"""A parameter server: rank 0's process holds the parameters and the optimizer; every rank works for it, by rpc."""

from typing import Literal

import torch
from torch import Tensor, nn

from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import Engine, MicroBatch, Step, Sums
from framework.optim.optimizers import BuildOptimizer, Trainable, stand_in


def parameter_server(
    model: nn.Module, *, world: World, forward: Forward, replicate: int | None, mode: Literal["sync", "async"]
) -> Engine:
    """Replicate the model; rank 0 serves. One process needs no server: it runs as it is. Collective."""
    mesh = world.mesh(replicate=replicate)
    model.to(world.device)
    plain = DataParallelEngine(
        model,
        model=model,
        forward=forward,
        mesh=mesh,
        dp_rank=world.rank,
        dp_size=world.world_size,
        broadcast=world.broadcast,
    )
    if world.world_size == 1:
        return plain
    if mode == "async":
        from framework.parallel.server.asynchronous import Hogwild

        return Hogwild(plain, world=world)
    return Synchronous(plain, world=world)


def problems(model: nn.Module, *, replicate: int, **others: object) -> list[str]:
    """Say that this build of torch cannot serve."""
    if replicate == 1 or torch.distributed.rpc.is_available():
        return []
    return ["this PyTorch build has no torch.distributed.rpc; ddp computes the same as mode=sync"]


class Synchronous:
    """An Engine equal to one process: one optimizer step, on rank 0, from the sum of all ranks' gradients.

    Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server", in its sequential mode.
    """

    def __init__(self, engine: DataParallelEngine, *, world: World) -> None:
        from framework.parallel.server.exchange import side_of  # a world of one needs no rpc, and a build may have none

        self.module = engine.module
        self.mesh = engine.mesh
        self.dp_rank = engine.dp_rank
        self.dp_size = engine.dp_size
        self._engine = engine
        self._device = world.device
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self._side = side_of(world)

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        # the plain engine undoes a mean over the ranks; here their gradients are summed
        step = step._replace(num_samples=step.num_samples * self.dp_size)
        sums = self._engine.forward_backward(step, index=index, loss_scale=loss_scale, measure=measure)
        self._side.add_up(self._parameters)
        return sums

    def forward(self, micro_batch: MicroBatch) -> Sums:
        return self._engine.forward(micro_batch)

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip the sum on rank 0, where alone it is; return its norm on every rank."""
        (norm,) = self._side.share(lambda: [self._engine.clip_grad_norm(max_norm)])
        return norm.to(self._device)

    def warm_up(self, step: Step) -> None:
        self._pull()

    def sync_buffers(self) -> None:
        self._engine.sync_buffers()

    def can_pause(self, step: int) -> bool:
        return True

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        optimizer = build(trained if self.dp_rank == 0 else stand_in(self._device))
        # at once, not before the next forward pass: an average of the weights follows them after each step
        optimizer.register_step_post_hook(lambda *_: self._pull())
        return optimizer

    @torch.no_grad()
    def _pull(self) -> None:
        for parameter, value in zip(self._parameters, self._side.share(lambda: [*self._parameters])):
            parameter.copy_(value)
