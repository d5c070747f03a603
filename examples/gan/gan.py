"""A generative adversarial network. Source: Goodfellow et al. 2014, with the non-saturating loss."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def layers(inputs: int, width: int, outputs: int) -> nn.Sequential:
    first, second, last = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, outputs)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), last)


class GAN(nn.Module):
    """A generator, from noise (B, noise) to images (B, C, H, H), and a critic, from images to one number per image (B,)."""

    def __init__(self, *, in_channels: int, image_size: int, noise: int, width: int) -> None:
        super().__init__()
        self.shape, pixels = (in_channels, image_size, image_size), in_channels * image_size**2
        self.generator = layers(noise, width, pixels)
        self.critic = layers(pixels, width, 1)

    def forward(self, x: Tensor, part: str) -> Tensor:
        if part == "generate":
            return self.generator(x).unflatten(1, self.shape)
        return self.critic(x.flatten(1)).squeeze(1)


class Adversarial:
    """The critic separates images from generated images. The generator tries to fool it, in turns (experiment/gan.yaml)."""

    def __init__(self, *, noise: int) -> None:
        self.noise = noise

    def step(self, call: Any, batch: Any, context: Any) -> Any:
        images = batch.inputs
        noise = torch.randn(len(images), self.noise, generator=context.generator, dtype=images.dtype, device=images.device)
        if context.turn == "generator":
            return F.softplus(-call(call(noise, "generate"), "judge")).sum()
        with torch.no_grad():
            generated = call(noise, "generate")
        of_images, of_generated = call(images, "judge"), call(generated, "judge")
        loss = F.softplus(-of_images).sum() + F.softplus(of_generated).sum()
        return {"loss": loss, "fooled": (of_generated > 0).sum()}
