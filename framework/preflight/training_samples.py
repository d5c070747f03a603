"""The samples that a rehearsal fetches from the training split, what they show about the data, and what their cut decides."""

import time
from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from framework.build.training import Builder
from framework.config.code import own_modules
from framework.data.loader import Loader
from framework.data.order import Order, parts
from framework.engine.seam import MicroBatch, Step
from framework.modules.tensors import tensors_in
from framework.preflight.differences import same
from framework.preflight.player import in_whole_batches
from framework.preflight.refused import Refused, blamed
from framework.randomness import has_drawn, seed_generators
from framework.training.plan import Plan

KEYED = "from torch, numpy.random or random directly"  # the run seeds these generators
_DEEP = 3  # the depth of nested objects, for example a dataset in a dataset
_AHEAD, _AHEAD_S = 40, 0.2  # steps and seconds before the first step is fetched again
_EPOCHS_S = 0.5  # seconds for the epochs of a sampler
_MOST_WORKERS = 4  # loader processes


class TrainingSamples:
    """The first steps of a run, on one process. Each method raises Refused for data that no run could repeat."""

    def __init__(self, build: Builder) -> None:
        with blamed("dataset", "its training split cannot be loaded", "see dataset.*"):
            self.source = build.source("train")
        self._build, self._run = in_whole_batches(build, self.source), build.of_run

    def _loader(self, *, num_workers: int = 0, micro_batch_size: int | None = None) -> Loader:
        with blamed("sampler", "it cannot order this data", "see sampler.*"):
            loader = self._build.loader(self.source, "train", dp_rank=0, dp_size=1)
        loader.num_workers = min(num_workers, loader.num_workers)
        loader.micro_batch_size = micro_batch_size or loader.micro_batch_size
        return loader

    def fetch(self, count: int) -> list[Step]:
        """Return so many steps."""
        self._check_epochs()
        loader, before = self._loader(), self._counts()
        with blamed("dataset", "its first batches cannot be fetched", "see dataset.*"):
            steps = loader.train(0)
            fetched, again = list(islice(steps, count + _MOST_WORKERS)), next(loader.train(0))
            until = time.monotonic() + _AHEAD_S
            for _ in range(_AHEAD):  # a counter may have an effect later
                if time.monotonic() < until:
                    next(steps)
            late = next(loader.train(0))
        if any(not equal(fetched[0], other) for other in (again, late)):
            what = "the same samples differ each time: it draws from its own generator, or counts"
            raise Refused("dataset", what, f"draw {KEYED}, or from the `keys` of transform()")
        for name, value in self._counts().items():
            if value != before.get(name, value):
                what = f"{name} changes when samples are fetched, and no checkpoint holds it"
                raise Refused("dataset", what, "let a sample depend only on its number and on `keys`")
        self._compare_workers(fetched)
        return fetched[:count]

    @cached_property
    def order(self) -> Order:
        """The run's own order."""
        with blamed("sampler", "it cannot order this data", "see sampler.*"):
            return self._run.loader(self.source, "train", dp_rank=0, dp_size=1).order

    @cached_property
    def plan(self) -> Plan:
        return Plan.of(self._run.config.trainer, self.order, checkpoint_every=None, grace_s=None)

    def _compare_workers(self, fetched: list[Step]) -> None:
        """Refuse samples that differ in the run's loader processes."""
        loader = self._loader(num_workers=_MOST_WORKERS)
        if not loader.num_workers:
            return
        cure = "open files, connections and pools when a process first uses them, or dataset.num_workers=0"
        with blamed("dataset", "its samples cannot be fetched by loader processes", cure):
            theirs = list(islice(loader.train(0), len(fetched)))
            loader.close()
        if not all(map(equal, fetched, theirs)):
            raise Refused("dataset", "its samples differ in loader processes: they share something with each other", cure)

    def _check_epochs(self) -> None:
        """Refuse a dataset with epochs of several lengths, and a sampler with epochs that differ at each draw.

        Also one whose epochs, as far as there is time, differ in length or hold other numbers.
        """
        order, steps = self.order, self.plan.total_steps
        num_epochs = -(-steps * order.global_batch_size // order.epoch_size)
        if num_epochs > 1 and (begin_epoch := getattr(self.source, "begin_epoch", None)) is not None:
            with blamed("dataset", "its set_epoch() fails", "see docs/data.md"):
                lengths = [(begin_epoch(epoch), getattr(self.source, "num_stored", len(self.source)))[1] for epoch in (1, 0)]
            if lengths[0] != lengths[1]:
                what = f"its set_epoch(1) changes its length from {lengths[1]} to {lengths[0]}: all epochs of a run have one"
                raise Refused("dataset", what, "one length, and other samples in each epoch")
        if order.draw is None:
            return
        until = time.monotonic() + _EPOCHS_S
        for epoch in range(num_epochs):
            with blamed("sampler", f"its epoch {epoch} fails", "see sampler.*"):
                drawn, again = (np.asarray(order.numbers(epoch)) for _ in range(2))
            if not np.array_equal(drawn, again):
                what = f"its epoch {epoch} has other samples each time: it draws from a generator, or shuffles its last order"
                raise Refused("sampler", what, "draw by np.random.RandomState, seeded by the seed and the epoch")
            if time.monotonic() > until:
                return

    def smallest(self, *, dp_size: int) -> int:
        """Return the number of samples in the run's smallest micro-batch, over all data-parallel ranks.

        Without a part that lets the batch grow, all epochs have the micro-batches of the first one.
        """
        order, samples_seen, sizes = self.order, 0, set[int]()
        end, until = self.plan.total_steps * order.global_batch_size, time.monotonic() + _EPOCHS_S
        while samples_seen < (order.epoch_size if order.grow is None else end) and time.monotonic() < until:
            size = order.size(samples_seen)
            sizes.add(size)
            samples_seen += size * ((order.epoch_size - samples_seen) // size if order.grow is None else 1)
        cut = (parts(size, micro_batch_size=self._run.config.known_micro_batch_size, dp_rank=rank, dp_size=dp_size)
               for size in sizes for rank in range(dp_size))  # fmt: skip
        return min(part.stop - part.start for mine in cut for part in mine)

    def _counts(self) -> dict[str, str]:
        """Return the numbers that objects of the user's classes keep; those of libraries (file positions) do not matter."""
        own, seen, found = own_modules(self._build.config.targets()), set[int](), dict[str, str]()

        def look(holder: Any, path: str, depth: int) -> None:
            if id(holder) in seen or depth > _DEEP or not hasattr(holder, "__dict__") or isinstance(holder, type):
                return
            seen.add(id(holder))
            for name, value in list(vars(holder).items()):
                if isinstance(value, (int, float)) and type(holder).__module__ in own:
                    found[path + name] = repr(value)  # the text of nan equals the text of nan
                look(value, f"{path}{name}.", depth + 1)

        if not hasattr(self.source, "is_stream"):  # it counts how far it has been read
            look(self.source, "", 0)
        look(self._build.dataset, "", 0)
        return found

    def cut(self, size: int) -> list[MicroBatch]:
        """Return the first step in micro-batches of so many samples: fetched anew, because a tensor's rows may be anything."""
        return list(self._loader(micro_batch_size=size).train_step(0).micro_batches)

    def first(self, count: int, *, size: int) -> list[MicroBatch]:
        """Return the first samples, in micro-batches of so many."""
        build = self._build.altered(global_batch_size=count, micro_batch_size=size, drop_last=count <= len(self.source))
        loader = build.loader(self.source, "train", dp_rank=0, dp_size=1)
        return list(loader.train_step(0).micro_batches)

    def later(self) -> list[Tensor]:
        """Return the first step's samples as they are in the next epoch."""
        with blamed("dataset", "its first batch cannot be fetched in another epoch", "see dataset.*"):
            return batch_tensors(self._loader().train_step(0, later=1))

    def step(self, index: int) -> Step:
        """Return the step with this number."""
        loader, samples_seen = self._loader(), 0
        for _ in range(index):
            samples_seen += loader.order.size(samples_seen)
        return loader.train_step(samples_seen)

    def compare(self, mine: list[Tensor], others: list[Tensor]) -> None:
        """Refuse data with a memory, if the results of `later` differ in two processes, each of which has loaded the data."""
        if not same_tensors(mine, others):
            one, again = (TrainingSamples(self._build)._loader().train_step(0) for _ in range(2))
            if not equal(one, again):
                raise differs_when_loaded("train")
            what = "a sample depends on the samples before: it keeps its draws, or counts"
            raise Refused("dataset", what, "keep only stored data, and draw each time")

    @property
    def draw_for_micro_batches(self) -> bool:
        """Whether a collate function or a transform of batches draws random numbers for a whole micro-batch."""
        seed_generators(0)  # for a loader that knows that nothing draws
        self._loader().train_step(0)
        return has_drawn()


def differs_when_loaded(split: str) -> Refused:
    """Return the refusal of a split that is another one each time that it is loaded."""
    what = f"its {split} split has other samples each time it is loaded: it draws from its own generator"
    return Refused("dataset", what, f"draw {KEYED}, which the run seeds for each split in the same way, or seed the generator")


def equal(one: Step | MicroBatch, other: Step | MicroBatch) -> bool:
    """Return whether two steps, or two micro-batches, have the same inputs and targets."""
    return same_tensors(batch_tensors(one), batch_tensors(other))


def same_tensors(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(map(same, mine, theirs))


def batch_tensors(step: Step | MicroBatch) -> list[Tensor]:
    """Return the inputs and targets; of a nested tensor, its rows."""
    micro_batches: Iterable[MicroBatch] = [step] if isinstance(step, MicroBatch) else step.micro_batches
    found = tensors_in([(micro_batch.inputs, micro_batch.targets) for micro_batch in micro_batches])
    return [row for tensor in found for row in (tensor.unbind() if tensor.is_nested else [tensor])]
