"""A small convolutional network without residual connections, for images of 8 x 8 to 64 x 64 pixels.

Shapes: B samples, C channels (they differ from block to block), H height, W width, K classes.
"""

import math
from typing import Literal

from torch import Tensor, nn

from models.checks import require_at_least, require_probability

# An image of this size is not halved: of the input of a 3 x 3 kernel on 2 x 2 pixels, more than half is padding.
LARGEST_SIZE_TO_KEEP = 4
MAX_GROUPS = 8


class CNN(nn.Module):
    """An image classifier: blocks of two convolutions, one block per entry of `channels`, then global average pooling.

    Between its convolutions, a block halves an image larger than 4 x 4, so that one setting works for 8 x 8 digits and
    28 x 28 photographs.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int,
        image_size: int,
        channels: list[int],
        norm: Literal["group", "batch", "none"] = "group",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_at_least(1, num_classes=num_classes, in_channels=in_channels, image_size=image_size)
        require_probability(dropout=dropout)
        if not channels:
            raise ValueError("channels=[]: a CNN needs at least one block; give one width per block, e.g. [32, 64]")
        self.layers = nn.ModuleList()
        size, width_in = image_size, in_channels
        for width_out in channels:
            halve = size > LARGEST_SIZE_TO_KEEP
            self.layers.append(
                nn.Sequential(
                    *_convolution(width_in, width_out=width_out, norm=norm),
                    nn.MaxPool2d(2) if halve else nn.Identity(),
                    *_convolution(width_out, width_out=width_out, norm=norm),
                )
            )
            size, width_in = size // 2 if halve else size, width_out
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width_in, num_classes)

    def blocks(self) -> list[nn.Module]:
        """List the convolutional blocks, first to last."""
        return list(self.layers)

    def chain(self) -> list[nn.Module]:
        """List the modules that, called one after the other, are the forward."""
        return [*self.layers, self.pool, self.dropout, self.head]

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits, shape (B, K)."""
        x = x_BCHW
        for link in self.chain():
            x = link(x)
        return x


def _convolution(width_in: int, *, width_out: int, norm: str) -> list[nn.Module]:
    """Return a convolution, a normalisation and a ReLU; the size of the image stays the same."""
    # The shift of a normalisation replaces the convolution's bias, which would have a gradient of zero.
    convolution = nn.Conv2d(width_in, width_out, kernel_size=3, padding=1, bias=norm == "none")
    return [convolution, _normalisation(norm, num_channels=width_out), nn.ReLU()]


def _normalisation(norm: str, *, num_channels: int) -> nn.Module:
    if norm == "group":
        return nn.GroupNorm(math.gcd(MAX_GROUPS, num_channels), num_channels)  # any number of channels is allowed
    if norm == "batch":
        return nn.BatchNorm2d(num_channels)
    if norm == "none":
        return nn.Identity()
    raise ValueError(f"norm={norm!r} is not one of: group, batch, none")
