"""monai's SegResNet with Lightning."""

from typing import Any

import lightning as L
from monai.losses import DiceCELoss
from monai.networks.nets import SegResNet
from monai.optimizers import Novograd, WarmupCosineSchedule


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = SegResNet(spatial_dims=3, in_channels=1, out_channels=3, blocks_down=(1, 1), blocks_up=(1,))
        self.loss_of = DiceCELoss(softmax=True, to_onehot_y=True)

    def training_step(self, batch: Any, number: int) -> Any:
        volumes, classes = batch
        return self.loss_of(self.model(volumes), classes)

    def configure_optimizers(self) -> Any:
        optimizer = Novograd(self.parameters(), lr=1e-2, weight_decay=1e-3)
        scheduler = WarmupCosineSchedule(optimizer, warmup_steps=3, t_total=12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, **options).fit(lit, loader)
