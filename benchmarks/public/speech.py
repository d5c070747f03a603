"""Connectionist temporal classification, by torch."""

import torch.nn.functional as F
from torch import Tensor


class CTC:
    def loss(self, outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        letters, lengths = targets["text"], targets["num_letters"]
        nll = F.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), letters, targets["num_frames"], lengths, reduction="none")
        return (nll / lengths).sum()

    def metrics(self, outputs: Tensor, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}
