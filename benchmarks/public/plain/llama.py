"""transformers' Llama in a plain loop."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup


def build() -> Any:
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )
    return LlamaForCausalLM(config)


def train(model: Any, batches: Any) -> Iterator[float]:
    decayed: Any = {"params": [p for name, p in model.named_parameters() if "norm" not in name]}
    others = {"params": [p for name, p in model.named_parameters() if "norm" in name], "weight_decay": 0}
    optimizer = torch.optim.AdamW([decayed, others], lr=3e-3, weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=12)
    for inputs, next_ids in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(**inputs).logits.flatten(0, 1), next_ids.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        yield loss.item()
