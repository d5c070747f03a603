"""The loss of monai, as a sum over the samples."""

from monai.losses import DiceCELoss
from torch import Tensor


class DiceAndEntropy:
    def __init__(self) -> None:
        self.mean_loss = DiceCELoss(softmax=True, to_onehot_y=True)

    def loss(self, outputs: Tensor, classes: Tensor) -> Tensor:
        return self.mean_loss(outputs, classes) * len(classes)

    def metrics(self, outputs: Tensor, classes: Tensor) -> dict[str, Tensor]:
        return {}
