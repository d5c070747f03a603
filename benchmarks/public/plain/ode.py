"""torchdiffeq in a plain loop."""

from collections.abc import Iterator
from typing import Any

import torch
from ode_model import NeuralODE


def build() -> Any:
    return NeuralODE(width=32)


def train(model: Any, batches: Any) -> Iterator[float]:
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=12)
    for starts, paths in batches:
        optimizer.zero_grad()
        loss = (model(starts) - paths).abs().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        yield loss.item()
