"""DiLoCo: local SGD with an outer optimizer with momentum that steps at each average. NOT equal to one process."""

from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from extras.local_sgd import local_sgd
from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.engine.seam import Demands

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
    averaging = local_sgd.Averaging(world, sync_every=sync_every, sync_first=sync_first)
    parts = {"average": OuterSteps(averaging, lr=outer_lr, momentum=outer_momentum)}
    return local_sgd.replicas(model, world=world, forward=forward, replicate=replicate, parts=parts, first=sync_first)


def problems(model: nn.Module, *, demands: Demands, sync_every: int, **others: object) -> list[str]:
    """Return the problems of local SGD, and refuse an optimizer that averages the weights but does not see the outer steps."""
    found = local_sgd.problems(model, demands=demands, sync_every=sync_every)
    if demands.averages_itself and not found:
        found.append("the optimizer averages the weights itself, and does not see the outer steps; take local-sgd, ddp or fsdp")
    return found


class OuterSteps:
    """A part around local SGD's: it turns the average of the processes into a step from the previous average.

    The outer gradient is the difference of the two averages; the outer optimizer is SGD with Nesterov momentum. No checkpoint
    holds the last average, because a checkpoint is saved only when the parameters are equal to it. The outer momentum is then
    in the optimizer's state. It is not there during a round, because an optimizer may use any state as its own. The inner
    optimizer state is averaged, as in local SGD; in the paper each process keeps its own.
    Source: Douillard et al. 2023, "DiLoCo: distributed low-communication training of language models", Algorithm 1.
    """

    def __init__(self, averaging: local_sgd.Averaging, *, lr: float, momentum: float) -> None:
        self._averaging, self._lr, self._momentum = averaging, lr, momentum
        self.can_save = averaging.can_save
        self._agreed: list[Tensor] = []  # a copy of each parameter at the start of the round; empty between rounds
        self._momenta: list[Tensor | None] = []

    def step_begun(self, loop: Any) -> None:
        every, first = self._averaging.sync_every, self._averaging.sync_first
        if loop.step % every == 0 or loop.step <= first:
            self._agreed = []  # after a rollback, the copies belong to another round
        if loop.step >= first and not self._agreed:
            self._begin_round(loop)

    def step_taken(self, loop: Any) -> None:
        self._averaging.step_taken(loop)
        if self._averaging.is_due(loop) and self._agreed:
            self._end_round(loop)

    def _begin_round(self, loop: Any) -> None:
        parameters, states = loop.trained().values(), loop.optimizer.state
        self._agreed = [parameter.detach().clone() for parameter in parameters]
        self._momenta = [states[p].pop(_KEY, None) if p in states else None for p in parameters]

    @torch.no_grad()
    def _end_round(self, loop: Any) -> None:
        for parameter, agreed, momentum in zip(loop.trained().values(), self._agreed, self._momenta):
            gradient = agreed.sub_(parameter)
            # in this order, a learning rate of 1 without momentum leaves the bits of the average unchanged
            parameter.add_(gradient, alpha=1 - self._lr)
            if momentum is None and self._momentum and gradient.any():  # a parameter that does not move gets no momentum
                momentum = torch.zeros_like(gradient)
            if momentum is not None:
                momentum.mul_(self._momentum).add_(gradient)
                parameter.add_(momentum, alpha=-self._lr * self._momentum)
                loop.optimizer.state[parameter][_KEY] = momentum
        self._agreed, self._momenta = [], []
