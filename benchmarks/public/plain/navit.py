"""vit-pytorch in a plain loop."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lion_pytorch import Lion
from transformers import get_cosine_schedule_with_warmup
from vit_pytorch.na_vit import NaViT


def build() -> Any:
    return NaViT(
        image_size=32, patch_size=8, num_classes=3, dim=32, depth=2, heads=2, dim_head=16, mlp_dim=32, dropout=0.1,
        token_dropout_prob=0.2,
    )  # fmt: skip


def train(model: Any, batches: Any) -> Iterator[float]:
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=12)
    mean = 0.0
    for number, (images, kinds) in enumerate(batches, 1):
        loss = F.cross_entropy(model(**images), kinds) / 4  # a step has four batches
        loss.backward()
        mean += loss.item()
        if number % 4 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield mean
            mean = 0.0
