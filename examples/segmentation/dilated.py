"""A small network of dilated convolutions, and the task that predicts each pixel's class.

Shapes: B images, C classes, H and W pixels.
Source: Yu and Koltun 2016 (dilated convolutions, which see further without losing resolution); Wu and He 2018 (GroupNorm).
"""

import torch.nn.functional as F
from torch import Tensor, nn

DILATIONS = (1, 1, 2, 4, 2, 1)  # together they see 11 pixels to each side, which is more than a digit
NUM_GROUPS = 4


class Layer(nn.Module):
    """A convolution that keeps H and W. GroupNorm uses the statistics of one sample, so the batch size has no effect."""

    def __init__(self, in_channels: int, out_channels: int, *, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=dilation, dilation=dilation)
        self.norm = nn.GroupNorm(NUM_GROUPS, out_channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(x_BCHW)))


class Dilated(nn.Module):
    """A network from images (B, in_channels, H, W) to logits (B, C, H, W)."""

    def __init__(self, *, in_channels: int, num_classes: int, width: int = 24) -> None:
        super().__init__()
        if width % NUM_GROUPS:
            raise ValueError(f"width={width} is not a multiple of {NUM_GROUPS}, the groups of GroupNorm")
        widths = [in_channels] + [width] * len(DILATIONS)
        self.layers = nn.ModuleList(
            Layer(before, after, dilation=dilation) for before, after, dilation in zip(widths, widths[1:], DILATIONS)
        )
        self.head = nn.Conv2d(width, num_classes, kernel_size=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        for layer in self.layers:
            x_BCHW = layer(x_BCHW)
        logits_BCHW: Tensor = self.head(x_BCHW)
        return logits_BCHW


class Segmentation:
    """Cross-entropy of the pixels. outputs (B, C, H, W) are logits, targets_BHW are int64. Targets of `ignored` do not count.

    Images have different numbers of counted pixels. So a loss is a sum with a weight: both are added over the whole global
    batch, then divided.
    """

    higher_is_better = {"accuracy": True}

    def __init__(self, *, ignored: int = -100) -> None:
        self.ignored = ignored

    def loss(self, outputs: Tensor, targets_BHW: Tensor) -> tuple[Tensor, Tensor]:
        total = F.cross_entropy(outputs, targets_BHW, ignore_index=self.ignored, reduction="sum")
        return total, (targets_BHW != self.ignored).sum()

    def metrics(self, outputs: Tensor, targets_BHW: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"accuracy": ((outputs.argmax(dim=1) == targets_BHW).sum(), (targets_BHW != self.ignored).sum())}
