"""transformers' Llama with Lightning."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Any, number: int) -> Any:
        inputs, next_ids = batch
        return F.cross_entropy(self.model(**inputs).logits.flatten(0, 1), next_ids.flatten())

    def configure_optimizers(self) -> Any:
        decayed: Any = {"params": [p for name, p in self.named_parameters() if "norm" not in name]}
        others = {"params": [p for name, p in self.named_parameters() if "norm" in name], "weight_decay": 0}
        optimizer = torch.optim.AdamW([decayed, others], lr=3e-3, weight_decay=0.1)
        scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(lit: Lit, loader: Any, **options: Any) -> None:
    L.Trainer(max_epochs=3, gradient_clip_val=1.0, **options).fit(lit, loader)
