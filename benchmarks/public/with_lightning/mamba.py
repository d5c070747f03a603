"""transformers' Mamba with Lightning."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from transformers import MambaConfig, MambaForCausalLM


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=4))

    def training_step(self, batch: Any, number: int) -> Any:
        ids, next_ids = batch
        return F.cross_entropy(self.model(ids).logits.flatten(0, 1), next_ids.flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RAdam(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, gradient_clip_val=1.0, **options).fit(lit, loader)
