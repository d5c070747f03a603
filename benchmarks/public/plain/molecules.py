"""torch-geometric's AttentiveFP in a plain loop."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch_geometric.nn.models import AttentiveFP


def build() -> Any:
    return AttentiveFP(
        in_channels=4, hidden_channels=16, out_channels=1, edge_dim=2, num_layers=2, num_timesteps=2, dropout=0.1
    )


def train(model: Any, batches: Any) -> Iterator[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.5)
    mean = 0.0
    for number, (graphs, numbers) in enumerate(batches, 1):
        loss = F.mse_loss(model(**graphs), numbers) / 4  # a step has four batches
        loss.backward()
        mean += loss.item()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            if number % 16 == 0:  # an epoch
                scheduler.step()
            yield mean
            mean = 0.0
