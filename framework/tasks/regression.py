"""Regression: the mean squared error over a sample's outputs."""

import torch.nn.functional as F
from torch import Tensor

from framework.tasks.outputs import main_output, with_auxiliary_loss


class Regression:
    """Mean squared error. outputs (B, N) and targets_BN are floating point."""

    higher_is_better = {"mae": False}

    def loss(self, outputs: Tensor, targets_BN: Tensor) -> Tensor:
        outputs_BN = main_output(outputs)
        total = F.mse_loss(outputs_BN, targets_BN.reshape(outputs_BN.shape), reduction="sum") / outputs_BN[0].numel()
        return with_auxiliary_loss(total, outputs)

    def predictions(self, outputs: Tensor, targets_BN: Tensor) -> tuple[Tensor, Tensor]:
        return main_output(outputs), targets_BN.reshape(main_output(outputs).shape)

    def metrics(self, outputs: Tensor, targets_BN: Tensor) -> dict[str, Tensor]:
        outputs_BN = main_output(outputs)
        return {"mae": F.l1_loss(outputs_BN, targets_BN.reshape(outputs_BN.shape), reduction="sum") / outputs_BN[0].numel()}
