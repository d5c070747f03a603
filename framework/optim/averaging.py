"""The moving average of the weights."""

import torch
from torch import Tensor

from framework.modules.shards import by_mesh
from framework.optim.optimizers import Trainable


class AveragedWeights:
    """An exponential moving average of the trainable parameters, on this rank's shards: no gather, no copy of the model."""

    def __init__(self, trained: list[Trainable], *, decay: float) -> None:
        self.decay = decay
        self._parameters: list[Tensor] = [item.parameter for item in trained]
        self.tensors = {item.name: item.parameter.detach().clone() for item in trained}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights, after an optimizer step."""
        for averages, parameters in zip(by_mesh(self.tensors.values()), by_mesh(self._parameters)):
            torch._foreach_lerp_(averages, parameters, 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and the average: once before an evaluation, once after."""
        for parameter, average in zip(self._parameters, self.tensors.values()):
            current = parameter.clone()
            parameter.copy_(average)
            average.copy_(current)
