"""Language modeling: the next token. Metrics are means over the tokens that count."""

import math

from torch import Tensor

from framework.tasks.cross_entropy import IGNORED, compiled_cross_entropy_sum, cross_entropy_sum, highest_class
from framework.tasks.outputs import main_output, with_auxiliary_loss


class LanguageModeling:
    """Cross-entropy of the next token, in nats. outputs (B, T, V) are logits, targets_BT int64; a target of -100 is not
    counted.

    `bytes_per_token`: the mean number of text bytes per token, or None if unknown.
    """

    higher_is_better = {"accuracy": True, "bits_per_token": False, "perplexity": False, "bits_per_byte": False}

    takes_cut_logits = True  # logits of a head that is cut by the vocabulary (framework/parallel/vocabulary.py)
    takes_16_bits = True  # logits in autocast's type: this task computes the loss in float32

    def __init__(self, *, bytes_per_token: float | None) -> None:
        self.bytes_per_token = bytes_per_token
        self._cross_entropy_sum = cross_entropy_sum

    def compile_loss(self) -> None:
        """Compute the loss with torch.compile from now on. The framework calls this if trainer.compile=true."""
        self._cross_entropy_sum = compiled_cross_entropy_sum

    def loss_weight(self, targets_BT: Tensor) -> Tensor:
        return (targets_BT != IGNORED).sum()

    def loss(self, outputs: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = main_output(outputs)
        total = self._cross_entropy_sum(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED)
        return with_auxiliary_loss(total, outputs, weights_B=lambda: (targets_BT != IGNORED).sum(dim=1))

    def predictions(self, outputs: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, V, T), in torchmetrics' format, and targets (B, T). Its `ignore_index` can skip the -100."""
        return main_output(outputs).movedim(-1, 1), targets_BT

    def metrics(self, outputs: Tensor, targets_BT: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        correct = (highest_class(main_output(outputs)) == targets_BT).sum()
        return {"accuracy": (correct, (targets_BT != IGNORED).sum())}

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Return the metrics that depend on the means over all tokens."""
        bits_per_token = means["loss"] / math.log(2)
        # the exponential of 700 nats is still a finite number
        derived = {"bits_per_token": bits_per_token, "perplexity": math.exp(min(means["loss"], 700.0))}
        if self.bytes_per_token is not None:
            derived["bits_per_byte"] = bits_per_token / self.bytes_per_token
        return derived
