"""Images, one batch at a time: from uint8 to normalised float32, and augmentation with a seed for each sample."""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from framework.modules.tensors import moved
from framework.randomness import random_integers


def normalise(images: Tensor, *, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return `(images / 255 - mean) / std` in float32; images: uint8 (B, C, H, W), with a mean and std for each channel."""
    scale, shift = _scale_and_shift(tuple(mean), tuple(std), images.device)
    # Two kernels, not a fused multiply-add: it can round differently in the last lanes of a batch, and a sample's bits
    # must not depend on its place in the batch.
    return images.float().mul_(scale).add_(shift)


@functools.cache
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    mean_C, std_C = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
    scale, shift = (1 / (255 * std_C), -mean_C / std_C)
    return scale.to(device, torch.float32).view(-1, 1, 1), shift.to(device, torch.float32).view(-1, 1, 1)


def augment(images: Tensor, keys: np.ndarray, *, padding: int, flip: bool) -> Tensor:
    """Shift each image by up to `padding` pixels in each direction, filled with zeros, and mirror half of them if `flip`.

    images: uint8 (B, C, H, W); keys: uint64 (B,). The changes of an image depend only on its key.
    Source: He et al. 2016, section 4.2 (crop from the padded image, horizontal flip).
    """
    draws = [random_integers(keys, high=high, draw=draw) for draw, high in enumerate((2 * padding + 1,) * 2 + (2,))]
    top, left, mirrored = moved(torch.from_numpy(np.stack(draws)), images.device)
    if flip:
        images = torch.where(mirrored.bool().view(-1, 1, 1, 1), images.flip(3), images)
    height, width = images.shape[2:]
    padded = pad(images, (padding, padding, padding, padding))
    crops = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view (B, C, top, left, H, W) of every possible crop
    return crops[torch.arange(len(images), device=images.device), :, top, left]
