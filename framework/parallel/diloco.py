"""DiLoCo: local SGD with an outer optimizer with momentum that steps at each average. NOT equal to one process."""

from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Demands, Engine, EngineAround, Step
from framework.engine.sums import Sums
from framework.optim.optimizers import BuildOptimizer, Trainable
from framework.parallel import local_sgd

exact_options = local_sgd.exact_options
_KEY = "outer_momentum"  # the key in the optimizer's state of a parameter


def diloco(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    sync_every: Annotated[int, Ge(1)],
    sync_first: Annotated[int, Ge(0)],
    outer_lr: Annotated[float, Gt(0)],
    outer_momentum: Annotated[float, Ge(0), Lt(1)],
) -> Engine:
    """Replicate the model. Collective."""
    periods = {"sync_every": sync_every, "sync_first": sync_first}
    inner = local_sgd.local_sgd(model, world=world, forward=forward, replicate=replicate, **periods)
    return DiLoCo(inner, lr=outer_lr, momentum=outer_momentum, **periods)


def problems(model: nn.Module, *, demands: Demands, sync_every: int, **others: object) -> list[str]:
    """Return the problems of local SGD, and refuse an optimizer that averages the weights but does not see the outer steps."""
    found = local_sgd.problems(model, demands=demands, sync_every=sync_every)
    if demands.averages_itself and not found:
        found.append("the optimizer averages the weights itself, and does not see the outer steps; take local-sgd, ddp or fsdp")
    return found


class DiLoCo(EngineAround):
    """An Engine around local SGD's: it turns the average of the processes into a step from the previous average.

    The outer gradient is the difference of the two averages; the outer optimizer is SGD with Nesterov momentum. No checkpoint
    holds the last average, because a checkpoint is saved only when the parameters are equal to it. The outer momentum is then
    in the optimizer's state. It is not there during a round, because an optimizer may use any state as its own. The inner
    optimizer state is averaged, as in local SGD; in the paper each process keeps its own.
    Source: Douillard et al. 2023, "DiLoCo: distributed low-communication training of language models", Algorithm 1.
    """

    def __init__(self, engine: Engine, *, sync_every: int, sync_first: int, lr: float, momentum: float) -> None:
        super().__init__(engine)
        self._sync_every, self._sync_first = sync_every, sync_first
        self._lr, self._momentum = lr, momentum
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters = [p for p in nn.Module.parameters(self.module) if p.requires_grad]
        self._agreed: list[Tensor] = []  # a copy of each parameter at the start of the round; empty between rounds
        self._momenta: list[Tensor | None] = []

    def make_optimizer(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        self._optimizer = self._engine.make_optimizer(build, trained)
        return self._optimizer

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        if index % self._sync_every == 0 or index <= self._sync_first:
            self._agreed = []  # after a rollback, the copies belong to another round
        if index >= self._sync_first and not self._agreed:
            self._begin_round()
        return self._engine.forward_backward(step, index=index, loss_scale=loss_scale, measure=measure)

    def meet(self, step: int, *, is_last: bool) -> bool:
        have_met = self._engine.meet(step, is_last=is_last)
        if have_met and self._agreed:
            self._end_round()
        return have_met

    def _begin_round(self) -> None:
        assert self._optimizer is not None
        self._agreed = [parameter.detach().clone() for parameter in self._parameters]
        states = self._optimizer.state
        self._momenta = [states[p].pop(_KEY, None) if p in states else None for p in self._parameters]

    @torch.no_grad()
    def _end_round(self) -> None:
        assert self._optimizer is not None
        for parameter, agreed, momentum in zip(self._parameters, self._agreed, self._momenta):
            gradient = agreed.sub_(parameter)
            # in this order, a learning rate of 1 without momentum leaves the bits of the average unchanged
            parameter.add_(gradient, alpha=1 - self._lr)
            if momentum is None and self._momentum and gradient.any():  # a parameter that does not move gets no momentum
                momentum = torch.zeros_like(gradient)
            if momentum is not None:
                momentum.mul_(self._momentum).add_(gradient)
                parameter.add_(momentum, alpha=-self._lr * self._momentum)
                self._optimizer.state[parameter][_KEY] = momentum
        self._agreed, self._momenta = [], []
