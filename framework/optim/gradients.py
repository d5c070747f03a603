"""What is done to a gradient between the backward pass and the optimizer: clipping by value, and noise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from framework.modules.shards import local, part_of
from framework.optim.optimizers import Trainable
from framework.randomness import key

ChangeGradients = Callable[
    [int], None
]  # of this rank's parameters or shards, in the step of that number, from 0. Collective


class ClipValues:
    """Brings every element of the gradient into [-max_value, max_value]."""

    def __init__(self, trained: list[Trainable], *, max_value: float) -> None:
        self.max_value = max_value
        self._parameters = [item.parameter for item in trained]

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        for parameter in self._parameters:
            if (gradient := _gradient_of(parameter)) is not None:
                mine = local(gradient)
                # one that is infinite is to be found out as a divergence, which a clamp would hide
                mine.masked_fill_(mine.isinf(), torch.nan).clamp_(-self.max_value, self.max_value)


class Noise:
    """Adds Gaussian noise of variance eta / (1 + step)^gamma to the gradient.

    A parameter's noise is drawn whole, by the run's seed, the step and the parameter's name, and cut as the gradient is:
    it does not depend on who holds which part of it.
    Source: Neelakantan et al. 2015, "Adding gradient noise improves learning for very deep networks".
    """

    def __init__(self, trained: list[Trainable], *, seed: int, eta: float, gamma: float) -> None:
        self.seed = seed
        self.eta = eta
        self.gamma = gamma
        self._trained = trained

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        std = (self.eta / (1 + step) ** self.gamma) ** 0.5
        for item in self._trained:
            if (gradient := _gradient_of(item.parameter)) is not None:
                generator = torch.Generator(gradient.device).manual_seed(
                    key(self.seed, "gradient noise", step, item.name)
                )
                noise = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype, device=gradient.device)
                local(gradient).add_(local(part_of(noise, like=gradient)), alpha=std)


def _gradient_of(parameter: Any) -> Tensor | None:
    """Return the gradient, cut as its parameter is: tensor parallelism leaves some as sums that nobody has taken yet."""
    gradient = parameter.grad
    if gradient is not None and getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return gradient
