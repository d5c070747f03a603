"""timm's Swin transformer with Lightning."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from timm.models import SwinTransformer
from timm.optim import Lamb


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = SwinTransformer(
            img_size=16, patch_size=2, in_chans=1, num_classes=3, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4,
            drop_path_rate=0.2,
        )  # fmt: skip

    def training_step(self, batch: Any, number: int) -> Any:
        images, kinds = batch
        return F.cross_entropy(self.model(images), kinds, label_smoothing=0.1)

    def configure_optimizers(self) -> Any:
        optimizer = Lamb(self.parameters(), lr=1e-2, weight_decay=0.02, max_grad_norm=None)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, gradient_clip_val=1.0, accumulate_grad_batches=4, **options).fit(lit, loader)
