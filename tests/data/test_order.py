"""Which samples make step t, and who runs them: pure functions, checked over all small cases."""

from functools import partial
from itertools import product

import numpy as np
import pytest

from framework.data.order import Order, Part, parts
from framework.runtime.exits import Unfit
from tests.faulty_data import Epochs

MICRO = (None, 1, 3, 5)


def order(num_samples: int = 50, *, batch: int = 16, seed: int = 0, drop_last: bool = False) -> Order:
    return Order(num_samples=num_samples, global_batch_size=batch, seed=seed, drop_last=drop_last)


def epochs(made: Order, number: int) -> list[list[np.ndarray]]:
    """Return the batches of the first epochs, walked as the loader walks them."""
    walked: list[list[np.ndarray]] = [[] for _ in range(number)]
    samples_seen = 0
    while samples_seen < number * made.epoch_size:
        epoch, samples = made.batch(samples_seen)
        assert len(samples) == made.size(samples_seen)
        walked[epoch].append(samples)
        samples_seen += len(samples)
    return walked


@pytest.mark.parametrize(("num_samples", "batch"), [(50, 16), (48, 16), (1, 1), (3, 8), (17, 4)])
def test_each_epoch_visits_each_sample_once_and_only_its_last_batch_is_short(num_samples: int, batch: int) -> None:
    made = order(num_samples, batch=batch)
    for batches in epochs(made, 3):
        assert sorted(np.concatenate(batches)) == list(range(num_samples))
        assert [len(b) for b in batches[:-1]] == [batch] * (made.steps_in(1) - 1)
        assert len(batches[-1]) == (num_samples - 1) % batch + 1


def test_drop_last_leaves_out_the_short_batch_and_other_samples_in_each_epoch() -> None:
    made = order(50, batch=16, drop_last=True)
    seen = [np.concatenate(batches) for batches in epochs(made, 6)]
    assert made.steps_in(1) == 3
    assert all(len(samples) == len(set(samples)) == 48 for samples in seen)
    assert len({tuple(sorted(set(range(50)) - set(samples))) for samples in seen}) > 1


def test_drop_last_that_would_drop_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves no batch of 7 samples in batches of 8"):
        order(7, batch=8, drop_last=True)


def test_a_batch_is_a_pure_function_of_samples_seen() -> None:
    walked = [samples for batches in epochs(order(), 4) for samples in batches]
    positions = [0, *np.cumsum([len(samples) for samples in walked])[:-1]]
    made = order()
    for at in np.random.RandomState(0).permutation(len(positions)):  # in any order, from one object or a new one
        assert np.array_equal(made.batch(int(positions[at]))[1], walked[at])
        assert np.array_equal(order().batch(int(positions[at]))[1], walked[at])


def test_epochs_and_seeds_are_in_different_orders() -> None:
    orders = [tuple(np.concatenate(batches)) for seed in (0, 1) for batches in epochs(order(seed=seed), 3)]
    assert len(set(orders)) == len(orders)


def cut(num_samples: int, micro: int | None, dp_size: int) -> list[list[Part]]:
    return [parts(num_samples, micro_batch_size=micro, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]


def real(ranks: list[list[Part]]) -> list[Part]:
    return [part for mine in ranks for part in mine if not part.is_padding]


@pytest.mark.parametrize("micro", MICRO)
def test_the_ranks_have_each_sample_once_in_order_in_even_shares_with_padding_last(micro: int | None) -> None:
    for n, dp_size in product(range(1, 41), range(1, 10)):
        ranks = cut(n, micro, dp_size)
        assert [i for part in real(ranks) for i in range(part.start, part.stop)] == list(range(n)), (n, dp_size)
        shares = [sum(part.stop - part.start if micro is None else 1 for part in real([mine])) for mine in ranks]
        assert max(shares) - min(shares) <= 1 and max(shares) == shares[0] > 0, (n, dp_size, shares)
        assert len({len(mine) for mine in ranks}) == 1, (n, dp_size)
        for mine in ranks:
            assert [part.is_padding for part in mine] == sorted(part.is_padding for part in mine)
            assert all(part.start < part.stop for part in mine)  # padding repeats real samples
            assert len(mine) <= max(1, len(real([mine]))) + 1
        if micro is not None:  # a micro-batch is the same on any number of ranks
            assert [(part.number, part.start) for part in real(ranks)] == [*enumerate(range(0, n, micro))]
        first = ranks[0][0]
        assert (first.number, first.start, first.is_padding) == (0, 0, False), (n, dp_size)


KINDS = {"shorter": (3, "epoch 3 has 20 samples, and epoch 0 has 40"), "longer": (1, "epoch 1 has 40 samples, and epoch 0 has 20"),
         "beyond": (0, "epoch 0 has the sample 4[0-2]"), "negative": (0, "epoch 0 has the sample -[1-3]"),
         "mask": (0, "epoch 0 has bool of shape"), "pairs": (0, "epoch 0 has int64 of shape"),
         "none": (2, "epoch 2 has object of shape"), "raises": (2, "epoch 2 fails: KeyError: 'no epoch 2', at .*faulty_data.py"),
         "fractions": (0, "epoch 0 has the sample .*5")}  # fmt: skip


def sampled(kind: str) -> Order:
    draw = partial(Epochs(kind).epoch, source=range(40), seed=3)
    return Order(num_samples=40, global_batch_size=40, seed=3, drop_last=False, draw=draw)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_keeps_its_contract_in_every_epoch_or_the_run_ends(kind: str) -> None:
    epoch, said = KINDS[kind]
    if epoch == 0:
        with pytest.raises(Unfit, match=f"sampler: {said}"):
            sampled(kind)
        return
    made = sampled(kind)
    for before in range(epoch):
        made.batch(before * made.epoch_size)
    with pytest.raises(Unfit, match=f"sampler: {said}"):
        made.batch(epoch * made.epoch_size)
    with pytest.raises(Unfit, match=f"sampler: {said}"):
        made.numbers(epoch)


@pytest.mark.parametrize("kind", ["list", "floats"])
def test_a_sampler_may_give_any_sequence_of_whole_numbers(kind: str) -> None:
    assert sorted(sampled(kind).batch(0)[1].tolist()) == list(range(40))
