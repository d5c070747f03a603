"""POT in a plain loop."""

from collections.abc import Iterator
from typing import Any

import ot
import torch
from torch import nn


def build() -> Any:
    return nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 2))


def train(model: Any, batches: Any) -> Iterator[float]:
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    for step, (noise, points) in enumerate(batches, 1):
        optimizer.zero_grad()
        cost = ot.dist(model(noise), points)
        equal = cost.new_full((len(cost),), 1 / len(cost))
        loss = ot.emd2(equal, equal, cost)
        loss.backward()
        optimizer.step()
        if step % 4 == 0:  # an epoch
            scheduler.step()
        yield loss.item()
