"""normflows in a plain loop."""

from collections.abc import Iterator
from typing import Any

import torch
from flow_model import real_nvp


def build() -> Any:
    return real_nvp(num_layers=6, width=32)


def train(model: Any, batches: Any) -> Iterator[float]:
    optimizer = torch.optim.Adamax(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step, (points, _) in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = model.forward_kld(points)
        loss.backward()
        optimizer.step()
        if step % 4 == 0:  # an epoch
            scheduler.step()
        yield loss.item()
