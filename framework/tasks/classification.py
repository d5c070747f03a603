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
        logits_BC = main_output(outputs)
        highest_BK = logits_BC.topk(min(5, logits_BC.shape[-1]), dim=-1).indices
        return {"accuracy": (logits_BC.argmax(dim=-1) == targets_B).sum(), "top5": (highest_BK == targets_B[:, None]).sum()}
