"""The order of a large data set: a bijection that looks like chance, costs no memory, and leaves earlier runs in their own order."""

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import framework.data.order
from framework.data.order import Order, Permutation
from framework.randomness import has_drawn, seed_generators
from tests.harness import assert_close, command, finished, once, together
from tests.test_resume import RUN, after_step, preempt

LARGE = (1 << 20) + 7
NUM = 1 << 16


def permuted(size: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    made = Permutation(size, seed=seed, epoch=epoch)
    return np.concatenate([made[start : start + 5000] for start in range(0, size, 5000)])


@pytest.mark.parametrize("size", [*range(1, 70), 97, 100, 1023, 1024, 1025, 99_991])
def test_each_number_comes_once(size: int) -> None:
    assert np.array_equal(np.sort(permuted(size)), np.arange(size))


def test_a_slice_is_what_it_is_whatever_was_looked_at_before() -> None:
    made, whole = Permutation(100_000, seed=3, epoch=1), permuted(100_000, seed=3, epoch=1)
    for start in (0, 90_000, 5, 8190, 99_999, 0):
        assert np.array_equal(made[start : start + 13], whole[start : start + 13])
    assert np.array_equal(made[10:60_000], whole[10:60_000])


# --- chance


def deviation(counts: np.ndarray) -> float:
    """Pearson's chi-square of counts that should be equal, in standard deviations from its mean."""
    free, expected = counts.size - 1, counts.sum() / counts.size
    return float((((counts - expected) ** 2).sum() / expected - free) / np.sqrt(2 * free))


def of_pairs(first: np.ndarray, second: np.ndarray, size: int) -> float:
    """How far pairs are from filling the square evenly: numbers on a lattice leave most of it empty."""
    return deviation(np.histogram2d(first, second, bins=32, range=[[0, size], [0, size]])[0].ravel())


def test_the_test_of_chance_finds_a_lattice_and_passes_numpy() -> None:
    lattice = np.arange(NUM) * 654_321 % LARGE
    assert of_pairs(lattice[:-1], lattice[1:], LARGE) > 100
    drawn = np.random.RandomState(0).permutation(LARGE)[:NUM]
    assert abs(of_pairs(drawn[:-1], drawn[1:], LARGE)) < 5


@pytest.mark.quick(1)
@pytest.mark.parametrize("place", [0, 1, 48, 96])
def test_over_seeds_each_number_is_as_likely_at_a_place(place: int) -> None:
    counts = np.bincount([Permutation(97, seed=seed, epoch=0)[place : place + 1][0] for seed in range(5000)], minlength=97)
    assert abs(deviation(counts)) < 5


@pytest.mark.parametrize("distance", [1, 2, 3, 256])
def test_numbers_near_each_other_in_the_order_lie_on_no_lattice(distance: int) -> None:
    numbers = Permutation(LARGE, seed=0, epoch=0)[0:NUM]
    first, second = numbers[:-distance], numbers[distance:]
    assert abs(of_pairs(first, second, LARGE)) < 5
    assert abs(deviation(np.histogram((second - first) % LARGE, bins=256, range=(0, LARGE))[0])) < 5


@pytest.mark.parametrize(("seed", "epoch"), [(0, 1), (0, 2), (1, 0)])
def test_the_orders_of_epochs_and_seeds_tell_nothing_of_each_other(seed: int, epoch: int) -> None:
    first = Permutation(LARGE, seed=0, epoch=0)[0:NUM]
    second = Permutation(LARGE, seed=seed, epoch=epoch)[0:NUM]
    assert abs(of_pairs(first, second, LARGE)) < 5
    assert abs(deviation(np.histogram((second - first) % LARGE, bins=256, range=(0, LARGE))[0])) < 5


def test_a_batch_is_a_fair_sample() -> None:
    """The share of the first half among each thousand numbers varies as in a draw without replacement."""
    numbers = permuted(LARGE, seed=5)[: 1000 * (LARGE // 1000)].reshape(-1, 1000)
    counts = (numbers < LARGE // 2).sum(axis=1)
    assert abs(counts.mean() - 500) < 1 and 0.9 < counts.var() / (250 * (1 - 1000 / LARGE)) < 1.1
    fixed = [int((permuted(1000, seed=seed) == np.arange(1000)).sum()) for seed in range(300)]
    assert 0.7 < np.mean(fixed) < 1.3


# --- what it costs, and which runs have it


def test_the_first_batch_of_a_billion_samples_takes_no_memory_to_speak_of() -> None:
    tracemalloc.start()
    _, samples = Order(num_samples=10**9, global_batch_size=256, seed=0, drop_last=False).batch(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(samples)) == 256 and samples.max() < 10**9
    assert peak < 1 << 20


def plant() -> None:
    """As if 10 samples were many."""
    framework.data.order._MOST_KEPT = 10


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[], ["parallel=ddp", "launch.nproc_per_node=2"]], ids=["single", "ddp 2"])
def test_a_large_data_set_is_trained_on_in_its_new_order_however_it_is_executed(ranks: list[str], tmp_path: Path) -> None:
    exact = [*RUN, "precision=fp64", "micro_batch_size=4"]
    whole = once(*exact, before=plant)
    line = [*exact, *ranks]
    assert command(*line, root=tmp_path / "runs", before=together(plant, after_step(9, preempt))).code == 75
    again = finished(*line, root=tmp_path / "runs", before=plant)
    assert_close(again, whole)
    assert [row["loss"] for row in once(*exact).rows] != [row["loss"] for row in whole.rows]


@pytest.mark.parametrize("draw", [random.random, lambda: random.gauss(0, 1), lambda: np.random.rand(), lambda: np.random.randn(),
                                  lambda: torch.rand(()), lambda: torch.randperm(3)])  # fmt: skip
def test_a_draw_from_any_common_generator_is_seen(draw: Callable[[], object]) -> None:
    seed_generators(7)
    assert not has_drawn()
    draw()
    assert has_drawn()
    seed_generators(7)
    own = torch.Generator().manual_seed(3)
    assert not has_drawn(own)
    torch.rand((), generator=own)
    assert has_drawn(own)
