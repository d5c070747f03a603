"""The distance of two paths."""

from torch import Tensor


class Distance:
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().mean(dim=(1, 2)).sum()

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}
