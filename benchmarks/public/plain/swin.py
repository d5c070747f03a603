"""timm's Swin transformer in a plain loop."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import SwinTransformer
from timm.optim import Lamb


def build() -> Any:
    return SwinTransformer(
        img_size=16, patch_size=2, in_chans=1, num_classes=3, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4,
        drop_path_rate=0.2,
    )  # fmt: skip


def train(model: Any, batches: Any) -> Iterator[float]:
    optimizer = Lamb(model.parameters(), lr=1e-2, weight_decay=0.02, max_grad_norm=None)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    mean = 0.0
    for number, (images, kinds) in enumerate(batches, 1):
        loss = F.cross_entropy(model(images), kinds, label_smoothing=0.1) / 4  # a step has four batches
        loss.backward()
        mean += loss.item()
        if number % 4 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield mean
            mean = 0.0
