"""Language modeling: one sequence is one sample; its loss is the mean over its tokens."""

import math

import torch.nn.functional as F
from torch import Tensor

from framework.tasks.outputs import main_output


class LanguageModeling:
    """Cross-entropy of the next token, in nats. outputs (B, T, V) logits, targets_BT int64.

    `bytes_per_token`: how many bytes of text a token has on average; None if not known.
    """

    def __init__(self, *, bytes_per_token: float | None) -> None:
        self.bytes_per_token = bytes_per_token

    def loss(self, outputs: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = main_output(outputs)
        total = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        return total / targets_BT.shape[1]

    def metrics(self, outputs: Tensor, targets_BT: Tensor) -> dict[str, Tensor]:
        correct = (main_output(outputs).argmax(dim=-1) == targets_BT).sum().double() / targets_BT.shape[1]
        return {"accuracy": correct, "bits_per_token": self.loss(outputs, targets_BT) / math.log(2)}

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Return what follows from the means over all samples."""
        # the exponential of 700 nats is still a number
        derived = {"perplexity": math.exp(min(means["loss"], 700.0))}
        if self.bytes_per_token is not None:
            derived["bits_per_byte"] = means["bits_per_token"] / self.bytes_per_token
        return derived
