"""The optimizer of airbench: Muon for the filters of convolutions, SGD for all other parameters; and its schedule."""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.sgd import sgd

from framework.modules.tensors import gradient_of, local, part_of, whole
from framework.optim.optimizers import Trainable, orthogonalised, param_groups, rules_of

Rate = Annotated[float, Gt(0)]
Momentum = Annotated[float, Ge(0), Lt(1)]


def filter_muon(
    trained: list[Trainable],
    *,
    lr: Rate,
    momentum: Momentum,
    iterations: Annotated[int, Ge(1)],
    sgd_lr: Rate,
    sgd_momentum: Momentum,
    decay: Annotated[float, Ge(0)],
    share: Annotated[float, Gt(0), Le(1)] = 1.0,
    groups: list[dict[str, Any]] | None = None,
) -> torch.optim.Optimizer:
    """Return Muon for the filters of convolutions, and SGD with Nesterov momentum for all other parameters.

    `decay` is the share of a parameter that a step of SGD at the peak rate removes. `share`: of the run's steps, in which the
    rate falls to zero (`linear`).
    """
    rules = rules_of(groups or [])
    of_filters: dict[str, Any] = {"kind": "muon", "lr": lr, "momentum": momentum, "iterations": iterations, "share": share}
    of_others: dict[str, Any] = {"kind": "sgd", "lr": sgd_lr, "momentum": sgd_momentum, "share": share}
    filters = param_groups([item for item in trained if item.parameter.ndim == 4], rules)
    others = [of_others | group for group in param_groups([item for item in trained if item.parameter.ndim != 4], rules)]
    decayed = [group | {"weight_decay": decay / group["lr"]} for group in others]
    return FilterMuon([*(of_filters | group for group in filters), *decayed], defaults={})


class FilterMuon(torch.optim.Optimizer):
    """A step of Muon or of SGD, by the `kind` of a group.

    Muon takes a filter as a matrix with a row for each output. It sets the length of the filter to the square root of the
    number of its rows, and then subtracts the orthogonalised momentum: the rate is relative to the weights.
    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers", and airbench94_muon.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: the Engine has run backward
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in moved:
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            if group["kind"] == "sgd":
                self._descend(moved, group)
            else:
                for parameter in moved:
                    self._turn(parameter, group)

    def _turn(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient, momentum = parameter.grad, group["momentum"]
        assert gradient is not None
        buffer: Tensor = self.state[parameter]["momentum_buffer"].mul_(momentum).add_(gradient)
        update = whole(gradient.add(buffer, alpha=momentum))  # Nesterov
        turned = orthogonalised(update.flatten(1), num_iterations=group["iterations"]).view(update.shape)
        parameter.mul_(len(update) ** 0.5 / whole(parameter).norm())
        parameter.add_(part_of(turned, like=parameter), alpha=-group["lr"])

    def _descend(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        sgd(
            [local(parameter) for parameter in parameters],
            [local(gradient) for parameter in parameters if (gradient := gradient_of(parameter)) is not None],
            [local(self.state[parameter]["momentum_buffer"]) for parameter in parameters],
            fused=True,
            nesterov=True,
            dampening=0.0,
            maximize=False,
            **{name: group[name] for name in ("weight_decay", "momentum", "lr")},
        )


def linear(optimizer: torch.optim.Optimizer, *, total_steps: int) -> LambdaLR:
    """Return a schedule in which each group's rate falls to zero in its `share` of the steps, and is zero in the others."""

    def fall(share: float) -> Callable[[int], float]:
        return lambda step: max(0.0, 1 - step / (share * total_steps))

    return LambdaLR(optimizer, [fall(group["share"]) for group in optimizer.param_groups])
