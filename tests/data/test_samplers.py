"""Samplers: pure functions of seed and epoch; each draws what it says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset

from framework.config.folders import option_node
from framework.config.validation import component_problems
from framework.data.map_style import MapStyle
from framework.data.order import Order
from framework.data.source import Selected
from framework.samplers.mixture import Mixture
from framework.samplers.values import values_of
from framework.samplers.weighted import Weighted

SIZE = 1000


class Numbered(SimpleNamespace):
    def __len__(self) -> int:
        return SIZE


def source(**values: Any) -> Numbered:
    return Numbered(**values)


SAMPLERS: dict[str, tuple[Any, Any]] = {
    "weighted": (lambda: Weighted(weights="targets", balanced=True), source(targets=np.arange(SIZE) % 10 == 0)),
    "mixture": (lambda: Mixture(weights=[1, 3], num_samples=400), source(groups=np.array([30, 1000]))),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_can_be_read_from_anywhere_and_depends_on_nothing_else(name: str) -> None:
    check_order(*SAMPLERS[name])


def check_order(make: Any, data: Any) -> None:
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
    "no such file": (lambda: Weighted(weights="none.npy"), "sampler.weights=none.npy: FileNotFoundError"),
    "of another number": (lambda: Weighted(weights="few"), "sampler.weights=few: ValueError: has int64 of shape [3], but there are 1000"),
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


def test_what_is_out_of_range_is_refused() -> None:
    (problem,) = component_problems("sampler", option_node("sampler", "weighted") | {"num_samples": 0}, known=[])
    assert (problem.key, problem.what) == ("sampler.num_samples", "0 is out of range")


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^sampler\."):
        Mixture(weights=[0, 0])


def test_a_share_or_a_fold_has_the_weights_and_the_groups_of_its_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", np.arange(20.0))
    of_two = ConcatDataset([[(number, 0) for number in range(size)] for size in (8, 12)])
    share = MapStyle(train=lambda: of_two).load("train")
    fold = Selected(share, np.arange(1, len(share), 3))
    stored = share.stored(np.arange(len(share)))  # type: ignore[attr-defined]
    for source, numbers in ((share, stored), (fold, stored[1::3])):
        assert len(source) < 20
        assert values_of(source, str(tmp_path / "weights.npy"), key="sampler.weights").tolist() == numbers.tolist()
        assert source.groups.tolist() == [(numbers < 8).sum(), len(numbers)]  # type: ignore[union-attr]
    np.save(tmp_path / "few.npy", np.arange(19.0))
    with pytest.raises(ValueError, match=f"there are {len(fold)} samples"):
        values_of(fold, str(tmp_path / "few.npy"), key="sampler.weights")
