"""Sharpness-aware minimisation: a step uses the gradients of a nearby point where the loss of its batch is higher."""

import math

import torch

from framework.modules.tensors import gradient_of
from framework.training.loop_view import Loop


class Sharpness:
    """A part with two backward passes a step: it uses the gradients at a point uphill.

    The weights move by `radius` along the gradient; its length is the norm over all parameters. They return when the gradients
    at that point are computed.
    Source: Foret et al. 2021, "Sharpness-aware minimization for efficiently improving generalization", algorithm 1.
    """

    def __init__(self, *, radius: float = 0.05) -> None:
        if radius <= 0:
            raise ValueError(f"radius={radius} is out of range (above 0)")
        self.radius = radius

    @torch.no_grad()
    def gradients_ready(self, loop: Loop) -> None:
        norm = math.sqrt(sum(norm**2 for norm in loop.gradient_norms().values()))
        if not 0 < norm < math.inf:
            return  # the loop reports the error
        before = {}
        for name, parameter in loop.trained().items():
            if (gradient := gradient_of(parameter)) is not None:
                before[name] = parameter.clone()
                parameter.add_(gradient, alpha=self.radius / norm)
        with torch.enable_grad():
            loop.recompute()
        for name, weights in before.items():
            loop.trained()[name].copy_(weights)
