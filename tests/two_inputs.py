"""A model and a dataset of somebody else's: two inputs, a dictionary of outputs, no answer to any question."""

import numpy as np
import torch
from torch import nn

from framework.data.source import Arrays


class TwoInputs(nn.Module):
    """Classifies a pair of vectors. One of its parameters is frozen."""

    def __init__(self, *, num_classes: int, dim: int = 12) -> None:
        super().__init__()
        self.left = nn.Linear(3, dim)
        self.right = nn.Linear(5, dim)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, dim), requires_grad=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        mixed = torch.tanh(self.left(left)) * self.scale + torch.sigmoid(self.right(right))
        return {"hidden": mixed, "logits": self.head(self.norm(mixed))}


class Pairs:
    """Pairs of vectors of 3 and of 5 numbers; the class is the larger's of their sums."""

    task = "classification"
    info = {"num_classes": 2}

    def __init__(self, *, num_samples: int = 66, num_workers: int = 0) -> None:
        self.num_samples = num_samples
        self.num_workers = num_workers

    def problems(self) -> list[str]:
        return []

    def load(self, split: str) -> Arrays:
        random = np.random.RandomState(("train", "val", "test").index(split))
        vectors = random.uniform(-1, 1, (self.num_samples, 8)).astype(np.float32)
        return Arrays(vectors, (vectors[:, :3].sum(axis=1) > vectors[:, 3:].sum(axis=1)).astype(np.int64))

    def transform(self, inputs, targets, *, keys):
        return {"left": inputs[:, :3], "right": inputs[:, 3:]}, targets
