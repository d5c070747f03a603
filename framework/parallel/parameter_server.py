"""A parameter server: rank 0's process holds the parameters and the optimizer; every rank works for it, by rpc."""

from typing import Literal

import torch
from torch import Tensor, nn

from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import Demands, Engine, EngineAround, Step, Sums
from framework.optim.groups import BuildOptimizer, Trainable
from framework.optim.optimizers import stand_in


def parameter_server(
    model: nn.Module, *, world: World, forward: Forward, replicate: int | None, mode: Literal["sync", "async"]
) -> Engine:
    """Replicate the model; rank 0 serves. One process needs no server: it runs as it is. Collective."""
    mesh = world.mesh(replicate=replicate)
    model.to(world.device)
    plain = DataParallelEngine(
        model, model=model, forward=forward, mesh=mesh, dp_rank=world.rank, dp_size=world.world_size, broadcast=world.broadcast
    )
    if world.world_size == 1:
        return plain
    if mode == "async":
        from framework.parallel.server.asynchronous import Hogwild

        return Hogwild(plain, world=world)
    return Synchronous(plain, world=world)


def problems(model: nn.Module, *, demands: Demands, replicate: int, mode: str, **others: object) -> list[str]:
    """Say that this build of torch cannot serve; and refuse what needs the ranks at the same parameters after each step."""
    if replicate == 1:
        return []
    if not torch.distributed.rpc.is_available():
        return ["this PyTorch build has no torch.distributed.rpc; ddp computes the same as mode=sync"]
    if mode != "async":
        return []
    at_odds = {
        "trainer.ema_decay": demands.ema_decay,
        "trainer.grad_noise.eta": demands.grad_noise,
        "trainer.sync_batchnorm": "true" if demands.sync_batchnorm else None,
        "trainer.divergence.action": demands.recovers,
        "precision": "fp16, whose loss scale follows every step's global norm" if demands.scales_loss else None,
    }
    return [f"{key}: {value}, but under parallel.mode=async each process is at a point of its own (parallel.mode=sync for that)"
            for key, value in at_odds.items() if value is not None]  # fmt: skip


class Synchronous(EngineAround):
    """An Engine equal to one process: one optimizer step, on rank 0, from the sum of all ranks' gradients.

    Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server", in its sequential mode.
    """

    def __init__(self, engine: DataParallelEngine, *, world: World) -> None:
        from framework.parallel.server.exchange import Client, Server  # a world of one needs no rpc, and a build may have none

        super().__init__(engine)
        self._device = world.device
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self._side = Server(world) if world.rank == 0 else Client(world)

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        # the plain engine undoes a mean over the ranks; here their gradients are summed
        step = step._replace(num_samples=step.num_samples * self.dp_size)
        sums = self._engine.forward_backward(step, index=index, loss_scale=loss_scale, measure=measure)
        self._side.add_up(self._parameters)
        return sums

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip the sum on rank 0, where alone it is; return its norm on every rank."""
        (norm,) = self._side.share(lambda: [self._engine.clip_grad_norm(max_norm)])
        return norm.to(self._device)

    def warm_up(self, step: Step) -> None:
        self._pull()

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        optimizer = build(trained if self.dp_rank == 0 else stand_in(self._device))
        # at once, not before the next forward pass: an average of the weights follows them after each step
        optimizer.register_step_post_hook(lambda *_: self._pull())
        return optimizer

    @torch.no_grad()
    def _pull(self) -> None:
        for parameter, value in zip(self._parameters, self._side.share(lambda: [*self._parameters])):
            parameter.copy_(value)
