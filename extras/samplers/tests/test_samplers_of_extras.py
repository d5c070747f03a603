"""The samplers of the extras: pure functions of seed and epoch; each draws what it says."""

from typing import Any

import numpy as np
import pytest

from extras.samplers.curriculum import Curriculum
from extras.samplers.length_grouped import LengthGrouped
from extras.samplers.windowed import Windowed
from framework.config.folders import option_node
from framework.config.validation import component_problems
from tests.data.test_samplers import SIZE, check_order, source

LENGTHS = np.arange(SIZE) * 7919 % 101
SAMPLERS: dict[str, tuple[Any, Any]] = {
    "length grouped": (lambda: LengthGrouped(lengths="lengths", batch_size=32, group_size=256), source(lengths=LENGTHS)),
    "curriculum": (lambda: Curriculum(difficulty="lengths", start=0.1, epochs=4), source(lengths=LENGTHS)),
    "windowed": (lambda: Windowed(window=64), source(groups=np.array([100, 350, 360, 1000]))),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_can_be_read_from_anywhere_and_depends_on_nothing_else(name: str) -> None:
    check_order(*SAMPLERS[name])


@pytest.mark.parametrize("name", ["length grouped", "windowed"])
def test_each_sample_comes_once_in_an_epoch(name: str) -> None:
    make, data = SAMPLERS[name]
    numbers = make().epoch(3, source=data, seed=0)[0:SIZE]
    assert sorted(numbers) == list(range(SIZE))


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


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [("windowed", "window", 0), ("curriculum", "start", 0.0), ("curriculum", "epochs", 0), ("length_grouped", "batch_size", 0)],
)
def test_what_is_out_of_range_is_refused(option: str, key: str, value: float) -> None:
    (problem,) = component_problems("sampler", option_node("sampler", option) | {key: value}, known=[])
    assert (problem.key, problem.what) == (f"sampler.{key}", f"{value} is out of range")


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^sampler\."):
        LengthGrouped(lengths="x", batch_size=9, group_size=8)
