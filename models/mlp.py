"""A multi-layer perceptron over flattened images.

Shapes: B samples, C channels, H height, W width, D hidden units, K classes.
"""

from itertools import pairwise

from torch import Tensor, nn

from models.checks import require_at_least, require_probability


class MLP(nn.Module):
    """An image classifier with `num_layers` hidden layers of `dim` units over the pixels."""

    def __init__(
        self, *, num_classes: int, in_channels: int, image_size: int, dim: int = 128, num_layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        require_at_least(1, num_classes=num_classes, in_channels=in_channels, image_size=image_size)
        require_at_least(1, dim=dim, num_layers=num_layers)
        require_probability(dropout=dropout)
        widths = [in_channels * image_size**2] + [dim] * num_layers
        self.flatten = nn.Flatten()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width_in, width_out), nn.GELU(), nn.Dropout(dropout))
            for width_in, width_out in pairwise(widths)
        )
        self.head = nn.Linear(dim, num_classes)

    def blocks(self) -> list[nn.Module]:
        """List the hidden layers, first to last."""
        return list(self.layers)

    def chain(self) -> list[nn.Module]:
        """List the modules that, called one after the other, are the forward."""
        return [self.flatten, *self.layers, self.head]

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits, shape (B, K)."""
        x = x_BCHW
        for link in self.chain():
            x = link(x)
        return x
