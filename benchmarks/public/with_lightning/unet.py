"""segmentation-models-pytorch with Lightning."""

from typing import Any

import lightning as L
import segmentation_models_pytorch as smp
import torch


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = smp.Unet(
            "tu-test_resnet", encoder_weights=None, encoder_depth=3, decoder_channels=[16, 8, 8], in_channels=1, classes=3
        )
        self.loss_of = smp.losses.DiceLoss(mode="multiclass")

    def training_step(self, batch: Any, number: int) -> Any:
        images, classes = batch
        return self.loss_of(self.model(images), classes)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        return [optimizer], [torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=6, power=0.9)]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, **options).fit(lit, loader)
