"""segmentation-models-pytorch in a plain loop."""

from collections.abc import Iterator
from typing import Any

import segmentation_models_pytorch as smp
import torch


def build() -> Any:
    return smp.Unet(
        "tu-test_resnet", encoder_weights=None, encoder_depth=3, decoder_channels=[16, 8, 8], in_channels=1, classes=3
    )


def train(model: Any, batches: Any) -> Iterator[float]:
    loss_of = smp.losses.DiceLoss(mode="multiclass")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=6, power=0.9)
    for step, (images, classes) in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = loss_of(model(images), classes)
        loss.backward()
        optimizer.step()
        if step % 4 == 0:  # an epoch
            scheduler.step()
        yield loss.item()
