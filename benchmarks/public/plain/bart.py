"""transformers' BART in a plain loop."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import Adafactor, BartConfig, BartForConditionalGeneration


def build() -> Any:
    config = BartConfig(
        vocab_size=32, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


def train(model: Any, batches: Any) -> Iterator[float]:
    optimizer = Adafactor(model.parameters(), lr=1e-2, relative_step=False, scale_parameter=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    total, num_tokens = 0.0, 0
    for number, (inputs, labels) in enumerate(batches, 1):
        num = int((labels != -100).sum())
        loss = model(**inputs, labels=labels).loss * num  # a step has four batches, with different numbers of tokens
        loss.backward()
        total, num_tokens = total + loss.item(), num_tokens + num
        if number % 4 == 0:
            for parameter in model.parameters():
                parameter.grad /= num_tokens
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield total / num_tokens
            total, num_tokens = 0.0, 0
