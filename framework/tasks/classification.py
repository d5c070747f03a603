"""Classification: one label per sample. A label of -100 is not counted."""

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.tasks.cross_entropy import IGNORED
from framework.tasks.outputs import main_output, with_auxiliary_loss


class Classification:
    """Cross-entropy over classes. outputs (B, C) are logits; targets_B are int64, or class shares (B, C) for mixed samples.

    A sample with the label -100 does not count.
    """

    higher_is_better = {"accuracy": True, "top5": True}

    def __init__(self, *, label_smoothing: float) -> None:
        self.label_smoothing = label_smoothing

    def loss_weight(self, targets_B: Tensor) -> Tensor:
        return self._counts(targets_B).sum()

    def loss(self, outputs: Tensor, targets_B: Tensor) -> Tensor:
        logits_BC = main_output(outputs)
        if logits_BC.ndim != 2:
            raise ValueError(f"the outputs are {list(logits_BC.shape)}, but classification takes (samples, classes): "
                             "labels of pixels or tokens need another task")  # fmt: skip
        total = F.cross_entropy(logits_BC, targets_B, reduction="sum", label_smoothing=self.label_smoothing)
        return with_auxiliary_loss(total, outputs, weights_B=lambda: self._counts(targets_B))

    def predictions(self, outputs: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
        return main_output(outputs), targets_B

    def metrics(self, outputs: Tensor, targets_B: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        logits_BC, count = main_output(outputs), self._counts(targets_B).sum()
        if targets_B.ndim == 2:
            targets_B = targets_B.argmax(dim=-1)
        highest_BK = logits_BC.topk(min(5, logits_BC.shape[-1]), dim=-1).indices
        correct = (logits_BC.argmax(dim=-1) == targets_B).sum()
        return {"accuracy": (correct, count), "top5": ((highest_BK == targets_B[:, None]).sum(), count)}

    def written(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return what mode=predict writes for a batch."""
        logits_BC = main_output(outputs)
        highest_B, class_B = logits_BC.softmax(dim=-1).max(dim=-1)
        return {"class": class_B, "probability": highest_B, "output": logits_BC}

    def _counts(self, targets_B: Tensor) -> Tensor:
        """Return which samples count; samples with class shares all do."""
        return targets_B != IGNORED if targets_B.ndim == 1 else torch.ones_like(targets_B[:, 0], dtype=torch.bool)
