"""Normalisation and augmentation of images, and the random numbers under them."""

import numpy as np
import pytest
import torch

from framework.data.images import augment, normalise
from framework.data.source import Images
from framework.randomness import permutation, random_bits, random_integers

KEYS = random_bits(np.arange(20_000))


def images(num: int, *, channels: int = 3, size: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (num, channels, size, size), dtype=torch.uint8, generator=generator)


def prepare(batch: torch.Tensor, *, keys: np.ndarray | None, **arguments) -> torch.Tensor:
    dataset = Images()
    vars(dataset).update(arguments, augment=True)
    return dataset.transform(batch, torch.zeros(len(batch)), keys=keys)[0]


def shift_and_mirror(image: np.ndarray, *, top: int, left: int, mirrored: bool, padding: int) -> np.ndarray:
    """One image by plain slicing: the reference."""
    image = image[:, :, ::-1] if mirrored else image
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    return padded[:, top : top + image.shape[1], left : left + image.shape[2]]


def test_random_bits_are_the_published_sequence_of_splitmix64():
    # the first outputs of Vigna's C code for the seed 1234567, as rosettacode.org lists them
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert [int(random_bits(np.array([1234567]), draw=draw)[0]) for draw in range(5)] == published


def test_random_integers_are_uniform_and_draws_are_independent():
    first, second = (random_integers(KEYS, high=5, draw=draw) for draw in (0, 1))
    for values, high in ((first, 5), (second, 5), (first * 5 + second, 25)):
        counts = np.bincount(values, minlength=high)
        expected = len(KEYS) / high
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert chi_squared < high - 1 + 4 * np.sqrt(2 * (high - 1))  # four standard deviations


def test_permutation_holds_each_number_once():
    order = permutation(1797)
    assert np.array_equal(np.sort(order), np.arange(1797))
    assert not np.array_equal(order, np.arange(1797))


def test_normalise_equals_the_formula_in_float64():
    batch = images(16)
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    expected = (batch.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    normalised = normalise(batch, mean=mean, std=std)
    assert normalised.dtype == torch.float32
    torch.testing.assert_close(normalised.double(), expected.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("flip", [False, True])
def test_augment_equals_slicing_one_image_at_a_time(flip: bool):
    batch, keys = images(100), KEYS[:100]
    top, left = (random_integers(keys, high=5, draw=draw) for draw in (0, 1))
    mirrored = random_integers(keys, high=2, draw=2) * flip
    expected = [
        shift_and_mirror(image, top=y, left=x, mirrored=bool(m), padding=2)
        for image, y, x, m in zip(batch.numpy(), top, left, mirrored, strict=True)
    ]
    assert np.array_equal(augment(batch, keys, padding=2, flip=flip).numpy(), np.stack(expected))


def test_a_sample_depends_on_its_key_and_not_on_its_batch():
    batch, keys = images(257, size=7), KEYS[:257]
    arguments = {"mean": [0.5] * 3, "std": [0.2] * 3, "padding": 2, "flip": True}
    whole = prepare(batch, keys=keys, **arguments)
    for size in (1, 10, 100):
        parts = [prepare(batch[i : i + size], keys=keys[i : i + size], **arguments) for i in range(0, 257, size)]
        assert torch.equal(torch.cat(parts), whole)
    order = torch.randperm(257, generator=torch.Generator().manual_seed(1))
    assert torch.equal(prepare(batch[order], keys=keys[order.numpy()], **arguments), whole[order])


def test_augment_uses_every_shift_and_mirrors_half():
    # a single bright pixel off the middle shows where an image went and which way round
    batch = torch.zeros(20_000, 1, 9, 9, dtype=torch.uint8)
    batch[:, 0, 4, 3] = 255
    where = augment(batch, KEYS, padding=1, flip=True)[:, 0].flatten(1).argmax(1)
    counts = torch.bincount(where, minlength=81).view(9, 9)[3:6, 2:7]
    # columns: 2..4 not mirrored, 4..6 mirrored; three rows equally
    expected = torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0]).expand(3, 5) * 20_000 / 18
    torch.testing.assert_close(counts.float(), expected, rtol=0.1, atol=0)


def test_augment_takes_an_empty_batch():
    assert augment(images(0), KEYS[:0], padding=2, flip=True).shape == (0, 3, 8, 8)
