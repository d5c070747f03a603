"""torch-geometric's AttentiveFP with Lightning."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch_geometric.nn.models import AttentiveFP


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = AttentiveFP(
            in_channels=4, hidden_channels=16, out_channels=1, edge_dim=2, num_layers=2, num_timesteps=2, dropout=0.1
        )

    def training_step(self, batch: Any, number: int) -> Any:
        graphs, numbers = batch
        return F.mse_loss(self.model(**graphs), numbers)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.5)]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, accumulate_grad_batches=4, **options).fit(lit, loader)
