"""Classification: one label per sample."""

import torch.nn.functional as F
from torch import Tensor

from framework.tasks.outputs import auxiliary_loss, main_output


class Classification:
    """Cross-entropy over classes. outputs (B, C) are logits; targets_B are int64, or class shares (B, C) for mixed samples."""

    higher_is_better = {"accuracy": True, "top5": True}

    def __init__(self, *, label_smoothing: float) -> None:
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensor, targets_B: Tensor) -> Tensor:
        total = F.cross_entropy(main_output(outputs), targets_B, reduction="sum", label_smoothing=self.label_smoothing)
        return total + auxiliary_loss(outputs)

    def predictions(self, outputs: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
        return main_output(outputs), targets_B

    def metrics(self, outputs: Tensor, targets_B: Tensor) -> dict[str, Tensor]:
        logits_BC = main_output(outputs)
        if targets_B.ndim == 2:
            targets_B = targets_B.argmax(dim=-1)
        highest_BK = logits_BC.topk(min(5, logits_BC.shape[-1]), dim=-1).indices
        return {"accuracy": (logits_BC.argmax(dim=-1) == targets_B).sum(), "top5": (highest_BK == targets_B[:, None]).sum()}

    def written(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return what mode=predict writes for a batch."""
        logits_BC = main_output(outputs)
        highest_B, class_B = logits_BC.softmax(dim=-1).max(dim=-1)
        return {"class": class_B, "probability": highest_B, "output": logits_BC}
