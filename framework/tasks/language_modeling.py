"""Language modeling: one sequence is one sample; its loss is the mean over its tokens."""

import math

import torch.nn.functional as F
from torch import Tensor


class LanguageModeling:
    """Cross-entropy of the next token, in nats. logits_BTV, targets_BT int64."""

    def loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        total = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        return total / targets_BT.shape[1]

    def metrics(self, logits_BTV: Tensor, targets_BT: Tensor) -> dict[str, Tensor]:
        correct = (logits_BTV.argmax(dim=-1) == targets_BT).sum().double() / targets_BT.shape[1]
        return {"accuracy": correct, "bits_per_token": self.loss(logits_BTV, targets_BT) / math.log(2)}
