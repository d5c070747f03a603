"""transformers' BART with Lightning."""

from typing import Any

import lightning as L
import torch
from transformers import Adafactor, BartConfig, BartForConditionalGeneration


class Lit(L.LightningModule):
    automatic_optimization = False  # accumulate_grad_batches averages the means of batches with different numbers of tokens

    def __init__(self) -> None:
        super().__init__()
        config = BartConfig(
            vocab_size=32, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
        )  # fmt: skip
        self.model = BartForConditionalGeneration(config)
        self.total, self.num_tokens = 0.0, 0

    def training_step(self, batch: Any, number: int) -> Any:
        inputs, labels = batch
        num = int((labels != -100).sum())
        loss = self.model(**inputs, labels=labels).loss * num
        self.manual_backward(loss)
        self.total, self.num_tokens = self.total + loss.item(), self.num_tokens + num
        if (number + 1) % 4:
            return None
        for parameter in self.parameters():
            parameter.grad /= self.num_tokens
        self.optimizers().step()
        self.lr_schedulers().step()
        self.optimizers().zero_grad()
        mean, self.total, self.num_tokens = self.total / self.num_tokens, 0.0, 0
        return {"loss": torch.tensor(mean, dtype=torch.float64)}

    def configure_optimizers(self) -> Any:
        optimizer = Adafactor(self.parameters(), lr=1e-2, relative_step=False, scale_parameter=False)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, **options).fit(lit, loader)
