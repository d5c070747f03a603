"""Small data for the public programs, made on the spot; each sample is a function of its number."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Made(Dataset[Any]):
    """`num_samples` samples; `make(generator)` makes a sample with draws from the generator of the sample."""

    def __init__(self, *, num_samples: int, make: Callable[[torch.Generator], Any]) -> None:
        self.num_samples, self.make = num_samples, make

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, number: int) -> Any:
        return self.make(torch.Generator().manual_seed(number))


def two_squares(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """An image (1, 16, 16) of noise with two squares, and the class of each pixel (0 = none)."""
    image, classes = 0.3 * torch.randn(1, 16, 16, generator=generator), torch.zeros(16, 16, dtype=torch.long)
    for kind in (1, 2):
        row, column = torch.randint(0, 11, (2,), generator=generator).tolist()
        classes[row : row + 6, column : column + 6] = kind
    return image + classes, classes


def image_of_any_size(generator: torch.Generator) -> tuple[Tensor, int]:
    """An image (3, H, W) with sides of 8 to 32 pixels, and its class: which channel is the brightest."""
    height, width = (8 * torch.randint(1, 5, (2,), generator=generator)).tolist()
    kind = int(torch.randint(0, 3, (), generator=generator))
    image = torch.randn(3, height, width, generator=generator)
    image[kind] += 1
    return image, kind


def moons(generator: torch.Generator) -> tuple[Tensor, int]:
    """A point (2,) of one of two half circles, and which."""
    angle, kind = torch.rand((), generator=generator) * torch.pi, int(torch.randint(0, 2, (), generator=generator))
    point = torch.stack([angle.cos(), angle.sin()]) * (1 - 2 * kind) + torch.tensor([1.0, 0.5]) * kind
    return point + 0.1 * torch.randn(2, generator=generator), kind


def spiral(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A start (2,) and the path (10, 2) from it, of a spiral with a cubic speed."""
    points = [torch.randn(2, generator=generator)]
    turn = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    for _ in range(9):
        points.append(points[-1] + 0.05 * (points[-1] ** 3).clamp(-2, 2) @ turn)
    return points[0], torch.stack(points)


def utterance(generator: torch.Generator) -> dict[str, Any]:
    """Sound (40, 16), silent after `num_frames`, and its text (6,), padded after `num_letters`."""
    num_letters = int(torch.randint(2, 7, (), generator=generator))
    text = torch.zeros(6, dtype=torch.long)
    text[:num_letters] = torch.randint(1, 8, (num_letters,), generator=generator)
    num_frames = 5 * num_letters + int(torch.randint(0, 11, (), generator=generator))
    sound = 0.3 * torch.randn(40, 16, generator=generator)
    sound[torch.arange(5 * num_letters), text[:num_letters].repeat_interleave(5)] += 1
    sound[num_frames:] = 0
    return {"sound": sound, "text": text, "num_frames": num_frames, "num_letters": num_letters}


def ragged(samples: list[tuple[Tensor, int]]) -> tuple[dict[str, list[Tensor]], Tensor]:
    """Make a batch of images of different sizes: a list, by the name of the argument that takes it."""
    images, kinds = zip(*samples)
    return {"batched_images": list(images)}, torch.tensor(kinds)
