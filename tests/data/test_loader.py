"""A batch is a function of its position: whoever fetches it, from wherever the run starts."""

import dataclasses
import functools
import gc
import multiprocessing
import os
import resource
import signal
import threading
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from framework.data.digits import Digits
from framework.data.loader import Loader
from framework.data.order import Order
from framework.data.source import Arrays, Selected, TokenSequences, Windows
from framework.data.synthetic import Synthetic
from framework.engine.seam import MicroBatch, Step
from framework.runtime.preemption import SIGNALS

NUM_SAMPLES = 1258  # of the digits' training split; 79 batches of 16, the last of 10


class OwnDigits(Digits):
    """With a transform of its own, so that it has loader processes."""

    def transform(self, inputs: Tensor, targets: Tensor, *, keys: np.ndarray | None) -> tuple[Tensor, Tensor]:
        return super().transform(inputs, targets, keys=keys)


class OfEpochs(Digits):
    """Its inputs are the epoch, and its targets the keys of the samples for all epochs."""

    def transform(self, inputs: Tensor, targets: Tensor, *, keys: Any, epoch: int = -1, sample_keys: Any = None) -> Any:
        of_all = torch.zeros(len(targets)) if sample_keys is None else torch.from_numpy(sample_keys.view(np.int64))
        return torch.full((len(targets),), epoch), of_all


def loader(*, num_workers: int = 0, augment: bool = True, kind: type[Digits] = OwnDigits, **options: Any) -> Loader:
    return loader_of(kind(augment=augment, num_workers=num_workers), **options)


def loader_of(dataset: Any, *, dp_rank: int = 0, dp_size: int = 1, split: str = "train",
              micro_batch_size: int | None = 5) -> Loader:  # fmt: skip
    source = dataset.load(split)
    return Loader(
        dataset,
        source,
        order=Order(num_samples=len(source), global_batch_size=16, seed=3, drop_last=False),
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def assert_same(mine: MicroBatch, other: MicroBatch) -> None:
    assert (mine.number, mine.is_padding) == (other.number, other.is_padding)
    assert torch.equal(mine.inputs, other.inputs) and torch.equal(mine.targets, other.targets)


def assert_same_steps(mine: list[Step], other: list[Step]) -> None:
    assert [(step.epoch, step.num_samples) for step in mine] == [(step.epoch, step.num_samples) for step in other]
    for one, two in zip(mine, other):
        assert len(one.micro_batches) == len(two.micro_batches)
        for pair in zip(one.micro_batches, two.micro_batches):
            assert_same(*pair)


def test_a_transform_can_know_the_epoch_and_a_key_of_each_sample_for_all_epochs() -> None:
    found: dict[int, set[int]] = {}
    for step in islice(loader(kind=OfEpochs).train(0), 2 * 79):
        for batch in step.micro_batches:
            assert (batch.inputs == step.epoch).all()
            for sample, key in zip(batch.samples, batch.targets.tolist()):
                found.setdefault(sample, set()).add(key)
    assert len(found) == len(set.union(*found.values())) == NUM_SAMPLES, "one key each, and no two alike"
    assert (next(loader(kind=OfEpochs, split="val").evaluate()).micro_batches[0].inputs == -1).all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_is_drawn_twice_is_augmented_twice(num_workers: int) -> None:
    made = loader(micro_batch_size=8, num_workers=num_workers)
    made.order = Order(num_samples=8, global_batch_size=16, seed=3, drop_last=False, draw=lambda _: np.tile(np.arange(8), 2))
    first, second = next(made.train(0)).micro_batches
    assert torch.equal(first.targets, second.targets)
    assert sum(torch.equal(one, other) for one, other in zip(first.inputs, second.inputs)) < 4
    made.close()


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("samples_seen", [0, 77 * 16, NUM_SAMPLES + 40 * 16])  # a start, an epoch's end, mid-epoch
def test_loader_processes_yield_the_bits_that_the_training_process_would(augment: bool, samples_seen: int) -> None:
    ours = list(islice(loader(augment=augment).train(samples_seen), 5))
    theirs = list(islice(loader(augment=augment, num_workers=2).train(samples_seen), 5))
    assert_same_steps(theirs, ours)


def test_augmentation_of_a_sample_differs_between_epochs() -> None:
    made = loader(micro_batch_size=None)
    by_sample = []
    for epoch in range(2):
        steps = list(islice(made.train(epoch * NUM_SAMPLES), 79))
        order = np.concatenate([made.order.batch(epoch * NUM_SAMPLES + 16 * i)[1] for i in range(79)])
        by_sample.append(torch.cat([step.micro_batches[0].inputs for step in steps])[np.argsort(order)])
    shifted_alike = (by_sample[0] == by_sample[1]).flatten(1).all(dim=1).double().mean()
    assert shifted_alike == pytest.approx(1 / 9, abs=0.04)  # of nine shifts, the same one


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dp_size", [1, 3])
def test_evaluation_visits_each_sample_once(num_workers: int, dp_size: int) -> None:
    made = [loader(split="val", num_workers=num_workers, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    ranks = [[m for step in one.evaluate() for m in step.micro_batches] for one in made]
    for one in made:
        one.close()
    assert len({len(micro_batches) for micro_batches in ranks}) == 1  # the same collectives on every rank
    stored, _ = Digits().transform(*map(torch.from_numpy, Digits().load("val").gather(np.arange(180))), keys=None)
    inputs = torch.cat([m.inputs for micro_batches in ranks for m in micro_batches if not m.is_padding])
    assert len(inputs) == 180
    assert sorted(map(bytes, inputs.numpy())) == sorted(map(bytes, stored.numpy()))


def test_later_evaluations_use_the_processes_of_the_first_one_even_if_it_was_left_early() -> None:
    made, others = loader(split="val", num_workers=2), set(multiprocessing.active_children())
    whole, children = list(made.evaluate()), set(multiprocessing.active_children()) - others
    assert len(children) == 2
    next(made.evaluate())
    assert_same_steps(list(made.evaluate()), whole)
    assert set(multiprocessing.active_children()) - others == children
    made.close()
    assert not set(multiprocessing.active_children()) - others


def test_a_loader_process_that_stands_still_after_its_fork_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python before 3.11.8 does, if another thread is about to enter the interpreter: before anything of ours runs."""
    num_forks = 0

    def fork() -> int:
        nonlocal num_forks
        num_forks += 1
        pid = original()
        if pid == 0 and num_forks == 2:
            signal.pause()
        return pid

    original = os.fork
    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr("framework.data.loader._FORK_S", 0.5)
    steps = loader(num_workers=2).train(0)
    assert_same_steps(list(islice(steps, 3)), list(islice(loader().train(0), 3)))
    assert num_forks == 4 and len(multiprocessing.active_children()) == 2


@pytest.mark.parametrize("fault", ["a lock in a sample", "too many open files"])
def test_a_batch_that_cannot_be_sent_is_an_error_and_no_hang(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = loader(num_workers=1)
    plain = made.dataset.transform

    def transform(inputs: Tensor, targets: Tensor, *, keys: np.ndarray | None) -> tuple[Any, Any]:
        if fault == "a lock in a sample":
            return plain(inputs, {"labels": targets, "lock": threading.Lock()}, keys=keys)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        return plain(inputs, targets, keys=keys)

    monkeypatch.setattr(made.dataset, "transform", transform)
    with pytest.raises(
        (TypeError, OSError, RuntimeError),  # which of the last two depends on which of torch's opens was one too many
        match="sending a batch from a loader process[^!]*(cannot pickle|Too many open files)",
    ):
        next(made.train(0))
    made.close()


def test_a_process_takes_the_open_files_that_it_may_have() -> None:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, allowed[1]))
        next(loader(num_workers=1).train(0))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(allowed[1] % (1 << 64), 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)


@pytest.mark.parametrize("signum", SIGNALS)
def test_loader_processes_survive_a_signal_to_the_whole_group(signum: int) -> None:
    before = {other: signal.signal(other, lambda *_: None) for other in SIGNALS}
    try:
        made = loader(num_workers=2)
        steps = made.train(0)
        begun = [next(steps)]
        children = multiprocessing.active_children()
        assert len(children) == 2
        for child in children:
            os.kill(child.pid, signum)
        assert_same_steps(begun + list(islice(steps, 9)), list(islice(loader().train(0), 10)))
        assert all(child.is_alive() for child in children)
    finally:
        for other, handler in before.items():
            signal.signal(other, handler)
    made.close()
    assert [child.exitcode for child in children] == [0, 0]  # they end all the same


def test_processes_end_when_their_loader_is_closed_and_not_whenever_a_collection_comes() -> None:
    """One that comes within an import would wait for a thread that waits for this import, and the processes would never end."""
    made, others = loader(num_workers=2), set(multiprocessing.active_children())
    next(made.train(0))
    gc.collect()
    first = set(multiprocessing.active_children()) - others
    next(made.train(0))  # a run that goes back
    second = set(multiprocessing.active_children()) - others
    assert len(first) == len(second) == 2 and not first & second
    made.close()
    assert not set(multiprocessing.active_children()) - others


def test_images_lie_in_memory_as_the_model_is_to_have_them() -> None:
    dataset = Synthetic(num_train=8, augment=True)
    plain = loader_of(dataset, micro_batch_size=4)
    others = dataclasses.replace(plain, channels_last=True)
    for one, other in zip(islice(plain.train(0), 2), islice(others.train(0), 2)):
        assert_same_steps([one], [other])
        assert {m.inputs.is_contiguous(memory_format=torch.channels_last) for m in one.micro_batches} == {False}
        assert {m.inputs.is_contiguous(memory_format=torch.channels_last) for m in other.micro_batches} == {True}
    vectors = Synthetic(kind="vectors", num_train=8)  # no images: (B, F)
    (step,) = islice(dataclasses.replace(loader_of(vectors, micro_batch_size=4), channels_last=True).train(0), 1)
    assert step.micro_batches[0].inputs.shape[0] == 4


def test_what_is_in_memory_has_no_loader_processes() -> None:
    """They would copy what is there, and be slower than no process. Whatever may draw, or takes long, has them."""
    made = loader(num_workers=2, kind=Digits)
    assert_same_steps(list(islice(made.train(0), 5)), list(islice(loader().train(0), 5)))
    first = dataclasses.replace(made, source=Selected(made.source, np.arange(40)), order=dataclasses.replace(made.order))
    assert made.num_workers == first.num_workers == 0
    assert loader(num_workers=2).num_workers == 2
    assert dataclasses.replace(made, batch_transform=lambda inputs, targets: (inputs, targets)).num_workers == 2


class DrawingWindows(Windows):
    """The marked `gather` of its class calls this."""

    def windows(self, indices: np.ndarray) -> np.ndarray:
        windows = super().windows(indices).copy()
        windows[np.random.rand(*windows.shape) < 0.3] = 0
        return windows


class Lazy:
    """As an array of another library, which reads where it is asked."""

    def __init__(self, stored: np.ndarray) -> None:
        self.stored = stored

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        return self.stored[indices] + np.random.rand()


class OneByOneToo(Arrays):
    def sample(self, index: int) -> Any:
        return self.inputs[index] + np.random.rand(), self.targets[index]

    def collate(self, samples: list[Any]) -> Any:
        return tuple(map(np.stack, zip(*samples)))


def wrapped(self: Digits, *args: Any, **kwargs: Any) -> Any:
    inputs, targets = Digits.transform(self, *args, **kwargs)
    return inputs + torch.rand(()), targets


class Wrapped(Digits):
    transform = functools.wraps(Digits.transform)(wrapped)


IMAGES = np.zeros((64, 1, 8, 8), np.uint8), np.arange(64) % 10
SOURCES: dict[str, tuple[Any, Any, int]] = {  # a dataset, a source, and whether loader processes are started for it
    "its windows draw": (TokenSequences(seq_len=7, num_workers=2), DrawingWindows(np.arange(600) % 50 + 1, 7), 0),
    "its array draws": (Digits(num_workers=2), Arrays(Lazy(IMAGES[0]), IMAGES[1]), 2),
    "its samples draw": (Digits(num_workers=2), OneByOneToo(*IMAGES), 2),
    "a wrapped transform draws": (Wrapped(num_workers=2), Arrays(*IMAGES), 2),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_what_draws_without_saying_so_is_the_same_from_anywhere(kind: str) -> None:
    dataset, source, num_workers = SOURCES[kind]
    made = dataclasses.replace(loader(), dataset=dataset, source=source,
                               order=Order(num_samples=len(source), global_batch_size=16, seed=3, drop_last=False))  # fmt: skip
    assert made.num_workers == num_workers
    whole = list(islice(made.train(0), 9))
    made.close()
    np.random.seed(7)
    seen = sum(step.num_samples for step in whole[:5])
    alone = dataclasses.replace(made, dataset=dataclasses.replace(dataset, num_workers=0))
    assert_same_steps(list(islice(alone.train(seen), 4)), whole[5:])
    assert len({float(step.micro_batches[0].inputs.double().sum()) for step in whole}) == 9, "it draws"
