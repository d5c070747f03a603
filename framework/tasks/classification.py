"""Classification: one label a sample."""

import torch.nn.functional as F
from torch import Tensor

from framework.tasks.outputs import main_output


class Classification:
    """Cross-entropy over classes. outputs (B, C) logits, targets_B int64."""

    def __init__(self, *, label_smoothing: float) -> None:
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensor, targets_B: Tensor) -> Tensor:
        return F.cross_entropy(main_output(outputs), targets_B, reduction="sum", label_smoothing=self.label_smoothing)

    def metrics(self, outputs: Tensor, targets_B: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (main_output(outputs).argmax(dim=-1) == targets_B).sum()}
