"""rtdl's FT-Transformer in a plain loop."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from rtdl_revisiting_models import FTTransformer


def build() -> Any:
    return FTTransformer(
        n_cont_features=4, cat_cardinalities=[3, 5], d_out=1, n_blocks=2, d_block=16, attention_n_heads=4, attention_dropout=0.1,
        ffn_d_hidden=None, ffn_d_hidden_multiplier=1.5, ffn_dropout=0.1, residual_dropout=0.0,
    )  # fmt: skip


def train(model: Any, batches: Any) -> Iterator[float]:
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-3, weight_decay=0.1)
    mean = 0.0
    for number, (row, target) in enumerate(batches, 1):
        loss = F.mse_loss(model(**row), target) / 4  # a step has four batches
        loss.backward()
        mean += loss.item()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            yield mean
            mean = 0.0
