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


def sentence(generator: torch.Generator) -> dict[str, Tensor]:
    """Ids (12,) that count up by a step, padded with zeros, with their mask; the next ids, -100 for padding."""
    length, step = torch.randint(5, 13, (), generator=generator), torch.randint(1, 4, (), generator=generator)
    ids = 3 + (torch.randint(0, 29, (), generator=generator) + step * torch.arange(13)) % 29
    mask = torch.arange(12) < length
    return {"input_ids": ids[:-1] * mask, "attention_mask": mask.long(), "next_ids": ids[1:].where(mask, -100)}


def translation(generator: torch.Generator) -> dict[str, Tensor]:
    """Ids (8,), padded with ones, with their mask; the same ids backwards, -100 for padding."""
    length = int(torch.randint(3, 9, (), generator=generator))
    ids, labels = torch.ones(8, dtype=torch.long), torch.full((8,), -100)
    ids[:length] = torch.randint(3, 32, (length,), generator=generator)
    labels[:length] = ids[:length].flip(0)
    return {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": labels}


def shape(generator: torch.Generator) -> tuple[Tensor, int]:
    """An image (1, 16, 16) of noise with a square, a row or a column, and which."""
    image, kind = 0.3 * torch.randn(1, 16, 16, generator=generator), int(torch.randint(0, 3, (), generator=generator))
    row, column = torch.randint(0, 10, (2,), generator=generator).tolist()
    height, width = ((6, 6), (2, 16), (16, 2))[kind]
    image[:, row : row + height, column : column + width] += 1
    return image, kind


def two_cubes(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A volume (1, 8, 8, 8) of noise with two cubes, and the class of each point (1, 8, 8, 8) (0 = none)."""
    volume, classes = 0.3 * torch.randn(1, 8, 8, 8, generator=generator), torch.zeros(1, 8, 8, 8, dtype=torch.long)
    for kind in (1, 2):
        x, y, z = torch.randint(0, 5, (3,), generator=generator).tolist()
        classes[:, x : x + 3, y : y + 3, z : z + 3] = kind
    return volume + classes, classes


def molecule(generator: torch.Generator) -> Any:
    """A ring of three to eight atoms of four kinds, with bonds of two kinds, and the number of atoms of the first kind."""
    from torch_geometric.data import Data

    num_atoms = int(torch.randint(3, 9, (), generator=generator))
    kinds = torch.randint(0, 4, (num_atoms,), generator=generator)
    here = torch.arange(num_atoms)
    bonds = torch.stack([torch.cat([here, here.roll(1)]), torch.cat([here.roll(1), here])])
    of_bonds = torch.eye(2)[torch.randint(0, 2, (num_atoms,), generator=generator)].repeat(2, 1)
    number = (kinds == 0).sum().float().reshape(1, 1)
    return Data(x=torch.eye(4)[kinds], edge_index=bonds, edge_attr=of_bonds, y=number)


def transition(generator: torch.Generator) -> dict[str, Any]:
    """A step of an episode: what was seen (4,), the action and its log probability, its advantage and its value."""
    observation, action = torch.rand(4, generator=generator) * 2 - 1, int(torch.randint(0, 2, (), generator=generator))
    log_prob, advantage, value = torch.randn(3, generator=generator).unbind()
    return {
        "observation": observation, "action": action, "log_prob": -0.7 + 0.1 * log_prob,
        "advantage": advantage + observation[0] * (2 * action - 1), "value": 0.3 * value + observation[1],
    }  # fmt: skip


def picture(generator: torch.Generator) -> tuple[Tensor, int]:
    """An image (1, 8, 8) with a bright square, and nothing to predict."""
    image = torch.full((1, 8, 8), -1.0)
    row, column = torch.randint(0, 5, (2,), generator=generator).tolist()
    image[:, row : row + 4, column : column + 4] = 1
    return image, 0


def table_row(generator: torch.Generator) -> dict[str, Tensor]:
    """Four numbers, two categories, and a number (1,) that follows from them."""
    x_cont = torch.randn(4, generator=generator)
    x_cat = torch.stack([torch.randint(0, number, (), generator=generator) for number in (3, 5)])
    return {"x_cont": x_cont, "x_cat": x_cat, "y": (x_cont[:2].prod() + 0.5 * x_cat[0]).reshape(1)}


def noise_and_moon(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A point (2,) of a normal distribution, and a point of one of two half circles."""
    return torch.randn(2, generator=generator), moons(generator)[0]
