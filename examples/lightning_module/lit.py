"""A LightningModule and its data, as Lightning's own pages write them: nothing here knows this framework."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Rings(L.LightningDataModule):
    """Which of three rings holds a point?"""

    def __init__(self, batch_size: int = 32, num_samples: int = 1500) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        draws = torch.Generator().manual_seed(0)
        points = torch.rand(self.hparams["num_samples"], 2, generator=draws) * 2 - 1
        rings = (points.norm(dim=-1) * 3).long().clamp(max=2)
        cut = len(points) * 4 // 5
        self.train, self.val = TensorDataset(points[:cut], rings[:cut]), TensorDataset(points[cut:], rings[cut:])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=self.hparams["batch_size"])


class Lit(L.LightningModule):
    def __init__(self, width: int = 64, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3))
        self.accuracy = MulticlassAccuracy(num_classes=3, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        outputs = self.net(x)
        self.accuracy(outputs, y)
        self.log("val_loss", F.cross_entropy(outputs, y))
        self.log("accuracy", self.accuracy)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs or 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}
