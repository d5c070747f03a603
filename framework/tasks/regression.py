"""Regression: the mean squared error over a sample's outputs."""

import torch.nn.functional as F
from torch import Tensor


class Regression:
    """outputs_BN and targets_BN, floating point."""

    def loss(self, outputs_BN: Tensor, targets_BN: Tensor) -> Tensor:
        return F.mse_loss(outputs_BN, targets_BN.reshape(outputs_BN.shape), reduction="sum") / outputs_BN[0].numel()

    def metrics(self, outputs_BN: Tensor, targets_BN: Tensor) -> dict[str, Tensor]:
        return {"mae": F.l1_loss(outputs_BN, targets_BN.reshape(outputs_BN.shape), reduction="sum") / outputs_BN[0].numel()}
