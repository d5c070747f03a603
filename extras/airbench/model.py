"""The network of airbench94: a whitening layer with fixed filters, then blocks of two convolutions.

Shapes: B samples, C channels (they differ from layer to layer), H height, W width, K classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH = 2  # pixels on a side of the patches that the first layer whitens
_POOL = 3  # pixels on a side of the last pooling


class Whiten(nn.Module):
    """A convolution over patches. Its filters are a buffer, which the part `whitening` sets; only its bias is trained.

    There are two filters for each number of a patch, with opposite signs. Before they are set, they copy the patch.
    Source: the paper, section 3.2.
    """

    weight: Tensor

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        size = in_channels * PATCH**2
        self.register_buffer("weight", two_signs(torch.eye(size), in_channels=in_channels))
        self.bias = nn.Parameter(torch.zeros(2 * size))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.conv2d(x_BCHW, self.weight, self.bias)


def two_signs(rows: Tensor, *, in_channels: int) -> Tensor:
    """Return filters (2 x rows, C, PATCH, PATCH) from flat filters: each of them, and then each with the other sign."""
    return torch.cat([rows, -rows]).view(-1, in_channels, PATCH, PATCH)


class Block(nn.Module):
    """Two convolutions, with a halving after the first. A convolution begins as the identity of as many channels as it gets.

    Normalisations have a trained shift and no scale. Source: the paper, sections 3.1 (layers) and 3.3 (identity).
    """

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (_convolution(width, width_out) for width in (width_in, width_out))
        self.norm1, self.norm2 = _norm(width_out), _norm(width_out)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x_BCHW), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class Airbench(nn.Module):
    """The whitening layer, one block for each of `widths`, a maximum over 3 x 3 places, and a linear layer.

    The logits are divided by the number of features. With the widths 64, 256 and 256, this is the network of the paper,
    section 3.1, with two million parameters.
    """

    def __init__(self, *, in_channels: int, image_size: int, num_classes: int, widths: list[int]) -> None:
        super().__init__()
        left = (image_size - PATCH + 1) // 2 ** len(widths) // _POOL
        if not widths or left < 1:
            needed = _POOL * 2 ** len(widths) + PATCH - 1
            raise ValueError(f"widths={widths} is not valid: each block halves the image, whose size is {image_size} "
                             f"(at least one width, and an image of at least {needed} pixels)")  # fmt: skip
        self.whiten = Whiten(in_channels)
        before = [2 * in_channels * PATCH**2, *widths]
        self.blocks = nn.ModuleList(Block(width_in, width_out) for width_in, width_out in zip(before, widths))
        self.head = nn.Linear(widths[-1] * left**2, num_classes, bias=False)
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.std())

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits, shape (B, K)."""
        x = F.gelu(self.whiten(x_BCHW))
        for block in self.blocks:
            x = block(x)
        x_BF = F.max_pool2d(x, _POOL).flatten(1)
        logits_BK: Tensor = self.head(x_BF) / x_BF.shape[1]
        return logits_BK


def _convolution(width_in: int, width_out: int) -> nn.Conv2d:
    convolution = nn.Conv2d(width_in, width_out, kernel_size=3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(convolution.weight[:width_in])
    return convolution


def _norm(width: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(width, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm
