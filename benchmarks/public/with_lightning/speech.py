"""conformer with Lightning."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from conformer import Conformer
from torch import nn
from transformers import get_linear_schedule_with_warmup


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Conformer(dim=16, depth=2, dim_head=8, heads=2, conv_kernel_size=7), nn.Linear(16, 8))

    def training_step(self, batch: Any, number: int) -> Any:
        sound, said = batch
        log_probabilities = self.model(sound).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probabilities, said["text"], said["num_frames"], said["num_letters"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.NAdam(self.parameters(), lr=2e-3, betas=(0.9, 0.98))
        scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, gradient_clip_val=1.0, **options).fit(lit, loader)
