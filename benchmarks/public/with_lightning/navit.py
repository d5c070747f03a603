"""vit-pytorch's NaViT with Lightning."""

from typing import Any

import lightning as L
import torch.nn.functional as F
from lion_pytorch import Lion
from transformers import get_cosine_schedule_with_warmup
from vit_pytorch.na_vit import NaViT


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = NaViT(
            image_size=32, patch_size=8, num_classes=3, dim=32, depth=2, heads=2, dim_head=16, mlp_dim=32, dropout=0.1,
            token_dropout_prob=0.2,
        )  # fmt: skip

    def training_step(self, batch: Any, number: int) -> Any:
        images, kinds = batch
        return F.cross_entropy(self.model(**images), kinds)

    def configure_optimizers(self) -> Any:
        optimizer = Lion(self.parameters(), lr=1e-3, weight_decay=0.01)
        scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, accumulate_grad_batches=4, gradient_clip_val=1.0, **options).fit(lit, loader)
