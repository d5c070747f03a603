"""Metrics as a user may bring them, for tests/test_torchmetrics.py; some with a fault."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class Odd(Metric):
    """States of every kind: a list that keeps the order of the samples, a largest and a smallest, one that is stacked."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx=None)
        self.add_state("largest", default=torch.tensor(-1.0), dist_reduce_fx="max")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx=None)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.seen += list(logits[:, 0])
        self.largest = torch.maximum(self.largest, logits.max())
        self.count = self.count + len(targets)

    def compute(self) -> dict[str, Any]:
        in_order = torch.stack(self.seen)
        weights = torch.arange(1, len(in_order) + 1, dtype=in_order.dtype)
        return {"order": (in_order * weights).sum(), "largest": self.largest, "count": self.count.sum(), "pair": (1, 2.0)}


class ByMeans(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("share", default=torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, logits: Tensor, targets: Tensor) -> None: ...

    def compute(self) -> Tensor:
        return self.share


class Best(Metric):
    """Keeps the best value of all evaluations, as a MinMaxMetric does."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sum", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.best, self.worst = float("inf"), float("-inf")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.sum += logits.square().sum()

    def compute(self) -> Tensor:
        self.best, self.worst = min(self.best, float(self.sum)), max(self.worst, float(self.sum))
        return torch.tensor(self.best)


class OfSome(Metric):
    """Of a random part of what it was given, as a kernel distance is."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.values.append(logits.square().sum(1))

    def compute(self) -> Tensor:
        values = torch.cat([value.reshape(-1) for value in self.values])
        return values[torch.randperm(len(values))[:5]].mean()
