"""A model of your own: any nn.Module. Arguments that depend on the data (num_classes, ...) are set by name."""

import torch
from torch import nn


class MyNet(nn.Module):
    def __init__(self, num_features, num_outputs, width=32, depth=2):
        super().__init__()
        widths = [num_features] + [width] * depth
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in zip(widths, widths[1:])))
        self.head = nn.Linear(widths[-1], num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))
