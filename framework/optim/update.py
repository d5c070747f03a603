"""One update of the parameters: everything between a step's gradients and the next parameters."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from framework.modules.tensors import by_mesh, local, part_of
from framework.optim.optimizers import Trainable
from framework.optim.precision import LossScale
from framework.randomness import key
from framework.runtime.torch_internals import move_all_towards

ChangeGradients = Callable[[int], None]  # of this rank, in a step, counted from 0. Collective


@dataclass(eq=False)
class ClipValues:
    """Clips every element of the gradient to [-max_value, max_value]."""

    trained: list[Trainable]
    _: KW_ONLY
    max_value: float

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        for item in self.trained:
            if (gradient := _gradient_of(item.parameter)) is not None:
                mine = local(gradient)
                # an infinite element means divergence, which a clamp would hide
                mine.masked_fill_(mine.isinf(), torch.nan).clamp_(-self.max_value, self.max_value)


@dataclass(eq=False)
class Noise:
    """Adds Gaussian noise of variance eta / (1 + step)^gamma to the gradient.

    A parameter's noise is drawn whole, by the run's seed, the step and the parameter's name, and then cut like the
    gradient: it does not depend on which rank has which part.
    Source: Neelakantan et al. 2015, "Adding gradient noise improves learning for very deep networks".
    """

    trained: list[Trainable]
    _: KW_ONLY
    seed: int
    eta: float
    gamma: float

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        std = (self.eta / (1 + step) ** self.gamma) ** 0.5
        for item in self.trained:
            if (gradient := _gradient_of(item.parameter)) is not None:
                generator = torch.Generator(gradient.device).manual_seed(key(self.seed, "gradient noise", step, item.name))
                noise = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype, device=gradient.device)
                local(gradient).add_(local(part_of(noise, like=gradient)), alpha=std)


def _gradient_of(parameter: Any) -> Tensor | None:
    """Return the gradient, cut like its parameter: tensor parallelism leaves some as sums that are not yet taken."""
    gradient = parameter.grad
    if gradient is not None and getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return gradient


class AveragedWeights:
    """An exponential moving average of the trained parameters, on this rank's shards: no gather, no copy of the model."""

    def __init__(self, trained: list[Trainable], *, decay: float) -> None:
        self.decay = decay
        self._parameters: list[Tensor] = [item.parameter for item in trained]
        self.tensors = {item.name: item.parameter.detach().clone() for item in trained}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights, after an optimizer step."""
        for averages, parameters in zip(by_mesh(self.tensors.values()), by_mesh(self._parameters)):
            move_all_towards(averages, parameters, share=1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and the average: before an evaluation, and again after it."""
        for parameter, average in zip(self._parameters, self.tensors.values()):
            current = parameter.clone()
            parameter.copy_(average)
            average.copy_(current)


@dataclass(eq=False)
class Update:
    """The optimizer with its learning rate, the loss scale, the changes of the gradients, and the weights' average.

    `schedule` gives the share of `peak_lr` for a step, counted from 0; the parameter groups of a rank may have other peaks.
    """

    optimizer: torch.optim.Optimizer
    _: KW_ONLY
    peak_lr: float
    schedule: Callable[[int], float]
    loss_scale: LossScale
    changes: Sequence[ChangeGradients]  # in this order, after the norm is clipped
    average: AveragedWeights | None

    def __post_init__(self) -> None:
        self._peak_lrs = [group["lr"] for group in self.optimizer.param_groups]

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.peak_lr * self.schedule(step)

    def take(self, step: int, *, grad_norm: Tensor | None) -> None:
        """Move the parameters by the gradients, or skip the step if fp16 gradients have overflowed.

        `grad_norm` is global, shape (); only fp16 needs it. Diverged if no loss scale is left to lower.
        """
        if not self.loss_scale.accepts(grad_norm):
            return
        share = self.schedule(step)
        for group, peak in zip(self.optimizer.param_groups, self._peak_lrs):
            group["lr"] = peak * share
        for change in self.changes:
            change(step)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
