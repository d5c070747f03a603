"""From the order of samples to this rank's micro-batches, as tensors on its device, for each split of a dataset."""

import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from framework.data.order import Order, Part, parts
from framework.data.source import Dataset, Source, Split
from framework.engine.seam import MicroBatch, Step
from framework.modules.tensors import Tree, map_tensors
from framework.randomness import keys
from framework.runtime.parent_death import die_with_parent
from framework.runtime.preemption import SIGNALS
from framework.runtime.torch_internals import shut_down_loader


@dataclass(eq=False)
class Loader:
    """One rank's view of one split. The content of a batch depends on its position only, so a run can start anywhere."""

    dataset: Dataset
    source: Source
    _: KW_ONLY
    order: Order
    micro_batch_size: int | None
    dp_rank: int
    dp_size: int
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.num_workers = int(getattr(self.dataset, "num_workers", 0))
        self.is_augmented = bool(getattr(self.dataset, "augment", False))
        self._running: weakref.WeakSet[Iterator[Step]] = weakref.WeakSet()

    def train(self, samples_seen: int) -> Iterator[Step]:
        """Yield the steps after `samples_seen` samples, without end."""
        return self._run(self._positions(samples_seen), self._train_step)

    def evaluate(self) -> Iterator[MicroBatch]:
        """Yield micro-batches that hold, over all ranks, each sample of the split once, in its stored order."""
        starts = range(0, len(self.source), self.order.global_batch_size)
        for step in self._run(starts, self._evaluation_step):
            yield from step.micro_batches

    def close(self) -> None:
        """End the loader's processes. They ignore signals, so at exit, after an error, Python would wait for them forever."""
        for steps in list(self._running):
            shut_down_loader(steps)
        self._running.clear()

    def _positions(self, samples_seen: int) -> Iterator[int]:
        while True:
            yield samples_seen
            samples_seen += self.order.size(samples_seen)

    def _train_step(self, samples_seen: int) -> Step:
        epoch, samples = self.order.batch(samples_seen)
        augment_keys = keys(self.order.seed, "augment", epoch, samples) if self.is_augmented else None
        return self._step(epoch, samples, augment_keys)

    def _evaluation_step(self, start: int) -> Step:
        return self._step(0, np.arange(start, min(start + self.order.global_batch_size, len(self.source))), None)

    def _step(self, epoch: int, samples: np.ndarray, augment_keys: np.ndarray | None) -> Step:
        mine = parts(len(samples), micro_batch_size=self.micro_batch_size, dp_rank=self.dp_rank, dp_size=self.dp_size)
        span = slice(min(part.start for part in mine), max(part.stop for part in mine))  # without gaps: fetched at once
        keys = None if augment_keys is None else augment_keys[span]
        inputs, targets = self._fetch(samples[span], keys)
        is_even = self.micro_batch_size is None or len(samples) % self.micro_batch_size == 0
        return Step(epoch, len(samples), [_micro_batch(part, inputs, targets, span=span) for part in mine], is_even)

    def _fetch(self, samples: np.ndarray, augment_keys: np.ndarray | None) -> tuple[Tree, Tree]:
        stored = (torch.from_numpy(array) for array in self.source.gather(samples))
        inputs, targets = self.dataset.transform(*stored, keys=augment_keys)
        return map_tensors(self._cast, inputs), map_tensors(self._cast, targets)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() and tensor.dtype != self.dtype else tensor

    def _run(self, positions: Iterable[int], fetch: Callable[[int], Step]) -> Iterator[Step]:
        if self.num_workers == 0:
            steps: Iterator[Step] = map(fetch, positions)
        else:
            loader = DataLoader(
                _AtPosition(fetch),
                batch_size=None,
                sampler=positions,  # type: ignore[arg-type]  # endless: a sampler is any iterable, its length is not read
                num_workers=self.num_workers,
                collate_fn=lambda step: step,
                # torch's watchdog looks every five seconds, and a queue may break before
                worker_init_fn=lambda _: die_with_parent(),
                multiprocessing_context="fork",
            )
            steps = _start_unsignalled(loader)
            self._running.add(steps)
        return steps if self.device.type == "cpu" else map(self._to_device, steps)

    def _to_device(self, step: Step) -> Step:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, non_blocking=True)

        return step._replace(micro_batches=[micro_batch.mapped(move) for micro_batch in step.micro_batches])


def _micro_batch(part: Part, inputs: Tree, targets: Tree, *, span: slice) -> MicroBatch:
    """Cut a part out of a batch that holds the samples of `span`."""
    if (part.start, part.stop) == (span.start, span.stop):
        return MicroBatch(part.number, inputs, targets, part.is_padding)
    at = slice(part.start - span.start, part.stop - span.start)
    return MicroBatch(part.number, inputs, targets, part.is_padding).mapped(lambda tensor: tensor[at])


@dataclass(frozen=True)
class _AtPosition(torch.utils.data.Dataset[Step]):
    """A map-style dataset whose items are whole steps."""

    fetch: Callable[[int], Step]

    def __getitem__(self, position: int) -> Step:
        return self.fetch(position)


def _start_unsignalled(loader: DataLoader[Step]) -> Iterator[Step]:
    """Start the loader's processes with our signals blocked: a signal to the whole process group must not kill them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(eq=False)
class Splits:
    """One rank's loaders by split; `load` makes each at its first use."""

    load: Callable[[Split], Loader]
    _loaders: dict[Split, Loader] = field(default_factory=dict, init=False)

    def loader(self, split: Split) -> Loader:
        """Return the loader of a split. Collective at its first use."""
        if split not in self._loaders:
            self._loaders[split] = self.load(split)
        return self._loaders[split]

    def close(self) -> None:
        """End the loaders' processes."""
        for loader in self._loaders.values():
            loader.close()
