"""normflows with Lightning."""

from typing import Any

import lightning as L
import torch
from flow_model import real_nvp


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = real_nvp(num_layers=6, width=32)

    def training_step(self, batch: Any, number: int) -> Any:
        points, _ = batch
        return self.model.forward_kld(points)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adamax(self.parameters(), lr=5e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, **options).fit(lit, loader)
