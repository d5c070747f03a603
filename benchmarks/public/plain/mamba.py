"""transformers' Mamba in a plain loop."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers import MambaConfig, MambaForCausalLM


def build() -> Any:
    return MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=4))


def train(model: Any, batches: Any) -> Iterator[float]:
    optimizer = torch.optim.RAdam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    for ids, next_ids in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).logits.flatten(0, 1), next_ids.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        yield loss.item()
