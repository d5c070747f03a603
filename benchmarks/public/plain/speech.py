"""conformer in a plain loop."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from conformer import Conformer
from torch import nn
from transformers import get_linear_schedule_with_warmup


def build() -> Any:
    return nn.Sequential(Conformer(dim=16, depth=2, dim_head=8, heads=2, conv_kernel_size=7), nn.Linear(16, 8))


def train(model: Any, batches: Any) -> Iterator[float]:
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=12)
    for sound, said in batches:
        optimizer.zero_grad()
        log_probabilities = model(sound).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(log_probabilities, said["text"], said["num_frames"], said["num_letters"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        yield loss.item()
