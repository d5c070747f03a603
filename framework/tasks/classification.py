"""Classification: one label a sample."""

import torch.nn.functional as F
from torch import Tensor


class Classification:
    """Cross-entropy over classes. logits_BC, targets_B int64."""

    def __init__(self, *, label_smoothing: float) -> None:
        self.label_smoothing = label_smoothing

    def loss(self, logits_BC: Tensor, targets_B: Tensor) -> Tensor:
        return F.cross_entropy(logits_BC, targets_B, reduction="sum", label_smoothing=self.label_smoothing)

    def metrics(self, logits_BC: Tensor, targets_B: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (logits_BC.argmax(dim=-1) == targets_B).sum()}
