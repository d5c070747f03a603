"""monai's SegResNet in a plain loop."""

from collections.abc import Iterator
from typing import Any

from monai.losses import DiceCELoss
from monai.networks.nets import SegResNet
from monai.optimizers import Novograd, WarmupCosineSchedule


def build() -> Any:
    return SegResNet(spatial_dims=3, in_channels=1, out_channels=3, blocks_down=(1, 1), blocks_up=(1,))


def train(model: Any, batches: Any) -> Iterator[float]:
    loss_of = DiceCELoss(softmax=True, to_onehot_y=True)
    optimizer = Novograd(model.parameters(), lr=1e-2, weight_decay=1e-3)
    scheduler = WarmupCosineSchedule(optimizer, warmup_steps=3, t_total=12)
    for volumes, classes in batches:
        optimizer.zero_grad()
        loss = loss_of(model(volumes), classes)
        loss.backward()
        optimizer.step()
        scheduler.step()
        yield loss.item()
