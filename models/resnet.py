"""Residual networks of 18, 34, 50 and 101 layers.

Shapes: B samples, C channels (they differ from block to block), H height, W width, K classes.
Source: He et al. 2016, "Deep Residual Learning for Image Recognition", tables 1 and 6; the stride of a bottleneck is on
its 3 x 3 convolution, as in torchvision. GroupNorm: Wu and He 2018.
"""

from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

# depth -> (number of blocks at widths 64, 128, 256 and 512; kind of block)
DEPTHS = {
    18: ([2, 2, 2, 2], "basic"),
    34: ([3, 4, 6, 3], "basic"),
    50: ([3, 4, 6, 3], "bottleneck"),
    101: ([3, 4, 23, 3], "bottleneck"),
}
NUM_GROUPS = 32


class ResNet(nn.Module):
    """A residual network that classifies images of any size.

    `stem="cifar"` keeps the size of the image before the first block, for images up to 64 x 64. `stem="imagenet"` divides
    the size by four.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int,
        depth: Literal[18, 34, 50, 101] = 18,
        stem: Literal["cifar", "imagenet"] = "cifar",
        norm: Literal["group", "batch"] = "group",
        zero_init_last_norm: bool = False,
    ) -> None:
        super().__init__()
        if depth not in DEPTHS:
            raise ValueError(f"depth={depth} is not one of: {', '.join(map(str, DEPTHS))}")
        counts, kind = DEPTHS[depth]
        self.stem = _stem(stem, in_channels=in_channels, norm=norm)
        self.layers = nn.ModuleList()
        width_in = 64
        for stage, count in enumerate(counts):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                block = ResidualBlock(kind, width_in=width_in, width=64 * 2**stage, stride=stride, norm=norm)
                self.layers.append(block)
                width_in = block.width_out
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width_in, num_classes)
        self._init_weights(zero_init_last_norm=zero_init_last_norm)

    def _init_weights(self, *, zero_init_last_norm: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, ResidualBlock) and zero_init_last_norm:
                # Each block starts as the identity. Source: Goyal et al. 2017, section 5.1.
                nn.init.zeros_(module.residual[-1].get_parameter("weight"))

    def blocks(self) -> list[nn.Module]:
        """List the residual blocks, first to last."""
        return list(self.layers)

    def chain(self) -> list[nn.Module]:
        """List the modules that, called one after the other, are the forward."""
        return [self.stem, *self.layers, self.pool, self.head]

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits, shape (B, K)."""
        x = x_BCHW
        for link in self.chain():
            x = link(x)
        return x


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions ("basic") or a 1 x 1, 3 x 3, 1 x 1 bottleneck, added to the input, then ReLU."""

    def __init__(self, kind: str, *, width_in: int, width: int, stride: int, norm: str) -> None:
        super().__init__()
        if kind == "basic":
            self.width_out = width
            kernels, widths, strides = [3, 3], [width_in, width, width], [stride, 1]
        else:
            self.width_out = 4 * width
            kernels, widths, strides = [1, 3, 1], [width_in, width, width, 4 * width], [1, stride, 1]
        parts: list[nn.Module] = []
        for (conv_in, conv_out), kernel, conv_stride in zip(pairwise(widths), kernels, strides, strict=True):
            parts += _convolution(conv_in, width_out=conv_out, kernel=kernel, stride=conv_stride, norm=norm)
            parts.append(nn.ReLU())
        self.residual = nn.Sequential(*parts[:-1])  # the last ReLU comes after the addition
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != self.width_out:
            self.shortcut = nn.Sequential(*_convolution(width_in, width_out=self.width_out, kernel=1, stride=stride, norm=norm))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.shortcut(x_BCHW) + self.residual(x_BCHW))


def _stem(stem: str, *, in_channels: int, norm: str) -> nn.Sequential:
    if stem == "cifar":
        return nn.Sequential(*_convolution(in_channels, width_out=64, kernel=3, stride=1, norm=norm), nn.ReLU())
    if stem == "imagenet":
        convolution = _convolution(in_channels, width_out=64, kernel=7, stride=2, norm=norm)
        return nn.Sequential(*convolution, nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
    raise ValueError(f"stem={stem!r} is not one of: cifar, imagenet")


def _convolution(width_in: int, *, width_out: int, kernel: int, stride: int, norm: str) -> list[nn.Module]:
    """Return a convolution and its normalisation; with a stride of 1, the size of the image stays the same."""
    convolution = nn.Conv2d(width_in, width_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [convolution, _normalisation(norm, num_channels=width_out)]


def _normalisation(norm: str, *, num_channels: int) -> nn.Module:
    if norm == "group":
        return nn.GroupNorm(NUM_GROUPS, num_channels)
    if norm == "batch":
        return nn.BatchNorm2d(num_channels)
    raise ValueError(f"norm={norm!r} is not one of: group, batch")
