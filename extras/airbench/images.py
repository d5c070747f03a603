"""Changes of whole batches of images, on any device: shifts, mirroring, squares cut out, and the views of a test image."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from framework.modules.tensors import moved
from framework.randomness import random_bits


def alternating(sample_keys: np.ndarray, *, epoch: int) -> np.ndarray:
    """Return which samples are mirrored, bool (B,): in the first epoch a random half, then each sample in every other epoch.

    Source: the paper, section 3.6.
    """
    return (random_bits(sample_keys) + np.uint64(epoch)) % np.uint64(2) == 1


def shifted(images: Tensor, keys: np.ndarray, *, mirrored: np.ndarray, most: int) -> Tensor:
    """Mirror the images that `mirrored` names, and shift each by up to `most` pixels, filled with its reflection.

    images: (B, C, H, W); keys: uint64 (B,). Source: the paper, section 3.1.
    """
    height, width = images.shape[2:]
    draws = np.stack([_integers(keys, count=2 * most + 1, draw=draw) - most for draw in (0, 1)])
    (down, right), flips = moved(torch.from_numpy(draws), images.device), moved(torch.from_numpy(mirrored), images.device)
    rows = _reflected(torch.arange(height, device=images.device) + down[:, None], size=height)
    columns = _reflected(torch.arange(width, device=images.device) + right[:, None], size=width)
    columns = torch.where(flips[:, None], width - 1 - columns, columns)
    places = (rows[:, :, None] * width + columns[:, None]).flatten(1)  # of each pixel, in an image as it is stored
    pixels = images.flatten(2)
    return pixels.gather(2, places[:, None].expand_as(pixels)).view(images.shape)


def cut_out(images: Tensor, keys: np.ndarray, *, size: int) -> Tensor:
    """Return the images with a square of `size` pixels set to 0 at a random place in each.

    Source: DeVries and Taylor 2017 (arXiv 1708.04552), section 3. Here the whole square is inside of the image.
    """
    inside = []
    for draw, length in enumerate(images.shape[2:], start=2):
        first = moved(torch.from_numpy(_integers(keys, count=length - size + 1, draw=draw)), images.device)[:, None]
        places = torch.arange(length, device=images.device)
        inside.append((places >= first) & (places < first + size))
    return images.masked_fill((inside[0][:, :, None] & inside[1][:, None])[:, None], 0)


def views(images: Tensor, *, shift: int) -> Iterator[tuple[float, Tensor]]:
    """Yield each view of a batch with its share: the images, and the images shifted both ways; all of them mirrored, too.

    The images that are not shifted have half of the weight. Source: the paper, section 3.5.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (shift,) * 4, mode="reflect")
    shifts = [(0.25, padded[..., first : first + height, first : first + width]) for first in (0, 2 * shift)]
    for share, view in [(0.5, images), *shifts]:
        yield share / 2, view
        yield share / 2, view.flip(-1)


def _reflected(places: Tensor, *, size: int) -> Tensor:
    """Return places outside of range(size) as their reflections at the first and the last place."""
    return size - 1 - (size - 1 - places.abs()).abs()


def _integers(keys: np.ndarray, *, count: int, draw: int) -> np.ndarray:
    return (random_bits(keys, draw=draw) % np.uint64(count)).astype(np.int64)
