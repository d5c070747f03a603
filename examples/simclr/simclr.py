"""Learning without labels: a view of an image must find its other view among all images. Source: Chen et al. 2020."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Encoder(nn.Module):
    """A network from images (B, C, H, H) to points (B, out) on a sphere."""

    def __init__(self, *, in_channels: int, image_size: int, width: int, out: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
        )
        self.projection = nn.Linear(width * (image_size // 2) ** 2, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.projection(self.features(x)), dim=1)


class SimCLR:
    """The normalised temperature-scaled cross entropy over the whole global batch, for any number of processes."""

    def __init__(self, *, temperature: float, noise: float) -> None:
        self.temperature, self.noise = temperature, noise

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        return call(self.view(batch.inputs)), call(self.view(batch.inputs))

    def loss_of_rows(self, own_views: Any, every_view: Any, batch: Any, context: Any) -> Any:
        (one, two), (every_one, every_two) = own_views, every_view
        own = torch.arange(context.start, context.start + len(one), device=one.device)
        of_one = F.cross_entropy(one @ every_two.T / self.temperature, own, reduction="sum")
        of_two = F.cross_entropy(two @ every_one.T / self.temperature, own, reduction="sum")
        return {"loss": (of_one + of_two) / 2, "found": ((one @ every_two.T).argmax(-1) == own).sum()}

    def view(self, images: Tensor) -> Tensor:
        """Return images (B, C, H, H), shifted by up to one pixel, each brighter or darker, and with noise."""
        down, right = (int(torch.randint(-1, 2, ())) for _ in range(2))
        light = 1 + 0.2 * torch.randn(len(images), 1, 1, 1, dtype=images.dtype).to(images.device)
        return images.roll((down, right), dims=(2, 3)) * light + self.noise * torch.randn_like(images)
