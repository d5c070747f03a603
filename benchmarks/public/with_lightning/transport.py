"""POT with Lightning."""

from typing import Any

import lightning as L
import ot
import torch
from torch import nn


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 2))

    def training_step(self, batch: Any, number: int) -> Any:
        noise, points = batch
        cost = ot.dist(self.model(noise), points)
        equal = cost.new_full((len(cost),), 1 / len(cost))
        return ot.emd2(equal, equal, cost)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, **options).fit(lit, loader)
