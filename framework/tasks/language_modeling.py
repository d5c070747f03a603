"""Language modeling: one sequence is one sample; its loss is the mean over its tokens."""

import math

import torch.nn.functional as F
from torch import Tensor

from framework.tasks.outputs import main_output


class LanguageModeling:
    """Cross-entropy of the next token, in nats. outputs (B, T, V) logits, targets_BT int64."""

    def loss(self, outputs: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = main_output(outputs)
        total = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        return total / targets_BT.shape[1]

    def metrics(self, outputs: Tensor, targets_BT: Tensor) -> dict[str, Tensor]:
        correct = (main_output(outputs).argmax(dim=-1) == targets_BT).sum().double() / targets_BT.shape[1]
        return {"accuracy": correct, "bits_per_token": self.loss(outputs, targets_BT) / math.log(2)}
