"""Samplers: pure functions of seed and epoch; each draws what it says."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from framework.config.folders import option_node
from framework.config.validation import component_problems
from framework.data.order import Order
from framework.samplers.curriculum import Curriculum
from framework.samplers.length_grouped import LengthGrouped
from framework.samplers.mixture import Mixture
from framework.samplers.weighted import Weighted
from framework.samplers.windowed import Windowed

SIZE = 1000


class Numbered(SimpleNamespace):
    def __len__(self) -> int:
        return SIZE


def source(**values: Any) -> Numbered:
    return Numbered(**values)


LENGTHS = np.arange(SIZE) * 7919 % 101
SAMPLERS: dict[str, tuple[Any, Any]] = {
    "weighted": (lambda: Weighted(weights="targets", balanced=True), source(targets=np.arange(SIZE) % 10 == 0)),
    "length grouped": (lambda: LengthGrouped(lengths="lengths", batch_size=32, group_size=256), source(lengths=LENGTHS)),
    "curriculum": (lambda: Curriculum(difficulty="lengths", start=0.1, epochs=4), source(lengths=LENGTHS)),
    "windowed": (lambda: Windowed(window=64), source(groups=np.array([100, 350, 360, 1000]))),
    "mixture": (lambda: Mixture(weights=[1, 3], num_samples=400), source(groups=np.array([30, 1000]))),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_can_be_read_from_anywhere_and_depends_on_nothing_else(name: str) -> None:
    make, data = SAMPLERS[name]

    def order(seed: int = 1) -> Order:
        sampler = make()
        draw = lambda epoch: sampler.epoch(epoch, source=data, seed=seed)  # noqa: E731
        return Order(num_samples=SIZE, global_batch_size=48, seed=seed, drop_last=False, draw=draw)

    made, batches, seen = order(), [], [0]
    while seen[-1] < 2 * made.epoch_size:
        batches.append(made.batch(seen[-1])[1])
        seen.append(seen[-1] + len(batches[-1]))
    for number in (0, 3, len(batches) // 2, len(batches) - 1):
        assert np.array_equal(order().batch(seen[number])[1], batches[number])
    assert all(batch.min() >= 0 and batch.max() < SIZE for batch in batches)
    assert not np.array_equal(order(2).batch(0)[1], batches[0])
    half = len(batches) // 2
    assert not np.array_equal(batches[0], batches[half])  # another epoch


@pytest.mark.parametrize("name", ["length grouped", "windowed"])
def test_each_sample_comes_once_in_an_epoch(name: str) -> None:
    make, data = SAMPLERS[name]
    numbers = make().epoch(3, source=data, seed=0)[0:SIZE]
    assert sorted(numbers) == list(range(SIZE))


def test_balanced_classes_are_drawn_as_often() -> None:
    make, data = SAMPLERS["weighted"]
    drawn = np.concatenate([make().epoch(epoch, source=data, seed=0) for epoch in range(20)])
    assert np.mean(data.targets[drawn]) == pytest.approx(0.5, abs=0.02)  # of 20,000; a tenth of the samples


def test_weights_say_how_often(tmp_path: Any) -> None:
    weights = np.arange(SIZE, dtype=np.float64)
    np.save(tmp_path / "weights.npy", weights)
    sampler = Weighted(weights=str(tmp_path / "weights.npy"), num_samples=100_000)
    counts = np.bincount(sampler.epoch(0, source=source(), seed=0), minlength=SIZE)
    assert counts[0] == 0
    expected = weights / weights.sum() * 100_000
    assert ((counts - expected) ** 2)[1:].sum() / expected[1:].sum() == pytest.approx(1.0, abs=0.2)  # a Poisson's spread


def test_samples_of_a_batch_are_of_about_one_length() -> None:
    make, data = SAMPLERS["length grouped"]
    numbers = make().epoch(0, source=data, seed=0)
    spread = [np.ptp(LENGTHS[numbers[start : start + 32]]) for start in range(0, 960, 32)]
    assert np.mean(spread) < 20 < np.ptp(LENGTHS) / 3


def test_hard_samples_come_later() -> None:
    make, data = SAMPLERS["curriculum"]
    sampler = make()
    hardest = [max(LENGTHS[sampler.epoch(epoch, source=data, seed=0)]) for epoch in range(6)]
    assert hardest[0] < hardest[1] < hardest[3] == hardest[5] == max(LENGTHS)
    assert max(LENGTHS[sampler.epoch(0, source=data, seed=0)[:20]]) <= np.quantile(LENGTHS, 0.2)
    later = np.bincount(np.concatenate([sampler.epoch(epoch, source=data, seed=0) for epoch in range(4, 54)]), minlength=SIZE)
    assert later.min() > 15 and later.mean() == 50.0


def test_a_window_is_all_that_is_mixed_and_shards_stay_together() -> None:
    make, data = SAMPLERS["windowed"]
    numbers = make().epoch(0, source=data, seed=0)
    shards = np.searchsorted(data.groups, numbers[0:SIZE], side="right")
    for start in range(0, SIZE, 64):
        assert len(set(shards[start : start + 64])) <= 3
    first = [
        tuple(dict.fromkeys(np.searchsorted(data.groups, make().epoch(e, source=data, seed=0)[0:SIZE], side="right")))
        for e in range(8)
    ]
    assert len(set(first)) > 3  # other orders in other epochs


def test_each_source_has_its_share_of_every_epoch_and_is_walked_through() -> None:
    make, data = SAMPLERS["mixture"]
    sampler, of_first = make(), []
    for epoch in range(3):
        numbers = sampler.epoch(epoch, source=data, seed=0)
        assert np.sum(numbers < 30) == 100
        of_first += list(numbers[numbers < 30])
    for start in range(0, 300, 30):  # passes, also across epochs
        assert sorted(of_first[start : start + 30]) == list(range(30))


WRONG = {
    "no such value": (lambda: Weighted(weights="nothing"), "sampler.weights=nothing: AttributeError: ... (a .npy file"),
    "no such file": (lambda: LengthGrouped(lengths="none.npy", batch_size=2), "sampler.lengths=none.npy: FileNotFoundError"),
    "of another number": (lambda: Curriculum(difficulty="few"), "sampler.difficulty=few: ValueError: has int64 of shape [3], but there are 1000"),
    "a negative weight": (lambda: Weighted(weights="negative"), "sampler.weights=negative: weights must not be negative"),
    "an empty source": (lambda: Mixture(weights=[1, 1]), "sampler.weights=[1, 1]: source 1 has no samples"),
    "sources": (lambda: Mixture(weights=[1, 1, 1]), "sampler.weights=[1, 1, 1]: there are 1 sources"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_said(what: str) -> None:
    make, words = WRONG[what]
    groups = {"groups": np.array([SIZE, SIZE])} if what == "an empty source" else {}
    data = source(few=np.arange(3), negative=-np.arange(SIZE), **groups)
    with pytest.raises(ValueError) as error:
        make().epoch(0, source=data, seed=0)
    start, _, end = words.partition(" ... ")
    assert str(error.value).startswith(start) and end in str(error.value)


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("windowed", "window", 0), ("curriculum", "start", 0.0), ("curriculum", "epochs", 0), ("weighted", "num_samples", 0),
        ("length_grouped", "batch_size", 0),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused(option: str, key: str, value: float) -> None:
    (problem,) = component_problems("sampler", option_node("sampler", option) | {key: value}, known=[])
    assert (problem.key, problem.what) == (f"sampler.{key}", f"{value} is out of range")


@pytest.mark.parametrize(
    "make", [lambda: LengthGrouped(lengths="x", batch_size=9, group_size=8), lambda: Mixture(weights=[0, 0])]
)
def test_what_does_not_go_together_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"^sampler\."):
        make()
