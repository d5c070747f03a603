"""torchdiffeq with Lightning."""

from typing import Any

import lightning as L
import torch
from ode_model import NeuralODE


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = NeuralODE(width=32)

    def training_step(self, batch: Any, number: int) -> Any:
        starts, paths = batch
        return (self.model(starts) - paths).abs().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RMSprop(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, **options).fit(lit, loader)
