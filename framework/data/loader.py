"""The way from the order of samples to this rank's micro-batches, as tensors on its device, for each split of a dataset."""

import inspect
import multiprocessing
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from multiprocessing.synchronize import Semaphore
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from framework.data.order import Order, Part, parts
from framework.data.source import Arrays, Dataset, Source, Split, draws_nothing, is_in_memory, is_vectorised
from framework.data.stream import ENDLESS, noted
from framework.data.to_device import mapped_except, to_device
from framework.engine.seam import MicroBatch, Step
from framework.randomness import key, keys, seed_generators
from framework.runtime.exits import RunEnded, Unfit, exits_as_errors
from framework.runtime.files import open_files
from framework.runtime.forks import begin_child
from framework.runtime.preemption import held_back
from framework.runtime.torch_internals import kill_loader, report_what_cannot_be_sent, shut_down_loader

_MOST_ON_DEVICE = 1 << 28  # bytes of the inputs of a split; CIFAR-10 has 154 MB
_FORK_S = 5.0  # a new process that has done nothing for so long hangs


@dataclass(eq=False)
class Loader:
    """One rank's view of one split. A batch depends only on its position, so a run can start at any step."""

    dataset: Dataset
    source: Source
    _: KW_ONLY
    order: Order
    micro_batch_size: int | None
    dp_rank: int
    dp_size: int
    device: torch.device
    dtype: torch.dtype
    batch_transform: Callable[[Any, Any], tuple[Any, Any]] | None = None  # of a micro-batch's inputs and targets, in training
    split: str = ""  # for messages
    keep_on_cpu: Collection[str] = ()  # the names of inputs and targets that a model needs there, whatever its device
    channels_last: bool = False  # the memory format of images; their shape stays (B, C, H, W)

    def __post_init__(self) -> None:
        transforms_anywhere = is_vectorised(self.dataset.transform) and self.batch_transform is None
        self._later = transforms_anywhere and self.device.type == "cuda"  # whether a batch is transformed on the model's device
        self._is_small = self._later and type(self.source) is Arrays and self.source.inputs.nbytes <= _MOST_ON_DEVICE
        needs_none = transforms_anywhere and is_in_memory(self.source)
        self.num_workers = 0 if needs_none else int(getattr(self.dataset, "num_workers", 0))
        self.is_augmented = bool(getattr(self.dataset, "augment", True))
        self._knows_epochs = "sample_keys" in inspect.signature(self.dataset.transform).parameters
        self._may_draw = self.batch_transform is not None or not draws_nothing(self.source, self.dataset.transform)
        self._knows_targets = self.dp_size > 1 and not self._may_draw and type(self.source) is Arrays  # those of all ranks
        # of training, and of evaluations, with processes. They are ended by `close`: a collection may come within an import,
        # for which the thread waits that tells the processes to end
        self._running: dict[bool, Iterator[Step | RunEnded]] = {}
        self._evaluating: DataLoader[int] | None = None  # with the processes of the first evaluation
        self.mark: dict[str, Any] = {}  # of a stream: its place before the last step, or before an earlier one

    def train(self, samples_seen: int) -> Iterator[Step]:
        """Yield the steps after `samples_seen` samples, without end."""
        steps = self._run(partial(self._positions, samples_seen), self.train_step)
        return noted(steps, self) if hasattr(self.source, "mark") else steps

    def evaluate(self) -> Iterator[Step]:
        """Yield batches that hold, over all ranks, each sample of the split once, in the stored order.

        Micro-batches are numbered over the whole split.
        """
        size = self.order.global_batch_size
        if len(self.source) == ENDLESS:
            raise Unfit(f"{self.split}: is a stream without an end (dataset.length.{self.split}=N)")

        def fetch(start: int) -> Step:
            samples = np.arange(start, min(start + size, len(self.source)))
            step = self._step(0, samples, samples, at=("evaluation", 0, start))
            return step._replace(micro_batches=[m._replace(number=start + m.number) for m in step.micro_batches])

        return self._run(partial(range, 0, len(self.source), size), fetch, is_evaluation=True)

    def close(self) -> None:
        """Stop the loader's processes. They ignore signals, so after an error, Python would wait for them forever at exit."""
        for steps in self._running.values():
            shut_down_loader(steps)
        self._running.clear()
        self._evaluating = None

    def _positions(self, samples_seen: int) -> Iterator[int]:
        while True:
            yield samples_seen
            samples_seen += self.order.size(samples_seen)

    def train_step(self, samples_seen: int, *, later: int = 0) -> Step:
        """Return the step after `samples_seen` samples; or the same samples `later` epochs later."""
        epoch, samples = self.order.batch(samples_seen)
        epoch += later
        mark: dict[str, Any] = self.source.mark(samples_seen) if self.dp_rank == 0 and hasattr(self.source, "mark") else {}
        step = self._step(epoch, samples, self.order.draws(samples_seen), at=("data", epoch, samples_seen))
        return step._replace(mark=mark) if mark else step

    def _step(self, epoch: int, samples: np.ndarray, draws: np.ndarray, *, at: tuple[str, int, int]) -> Step:
        fetched: dict[int, MicroBatch] = {}  # by number, because padding repeats a micro-batch
        micro_batches: list[MicroBatch] = []
        for part in parts(len(samples), micro_batch_size=self.micro_batch_size, dp_rank=self.dp_rank, dp_size=self.dp_size):
            if part.number not in fetched:
                span = slice(part.start, part.stop)
                fetched[part.number] = self._micro_batch(part, samples[span], draws[span], at=at)
            micro_batch = fetched[part.number]
            micro_batches.append(micro_batch._replace(is_padding=True) if part.is_padding else micro_batch)
        targets = torch.from_numpy(self.source.targets[samples]) if self._knows_targets else None  # type: ignore[attr-defined]
        batch = at[2] % self.order.epoch_size // self.order.global_batch_size
        return Step(epoch, len(samples), micro_batches, targets=targets, batch=batch)

    def _micro_batch(self, part: Part, samples: np.ndarray, draws: np.ndarray, *, at: tuple[str, int, int]) -> MicroBatch:
        """Return the micro-batch of these samples. Its padding depends only on these samples, not on others of this rank."""
        is_training, epoch, start = at[0] == "data", at[1], at[2]
        if (begin_epoch := getattr(self.source, "begin_epoch", None)) is not None:
            begin_epoch(epoch if is_training else 0)  # a share of train is evaluated as it is stored
        one_by_one: Any = getattr(self.source, "sample", None)
        fetched: list[Any] = []
        for sample, draw in zip(samples, draws) if one_by_one is not None else ():
            seed_generators(key(self.order.seed, "sample", epoch if is_training else "evaluation", int(draw)))
            fetched.append(one_by_one(int(sample)))
        if self._may_draw:
            seed_generators(key(self.order.seed, at[0], start, part.number))
        numbers = getattr(self.source, "stored", lambda samples: samples)(samples).tolist()
        gather = self.source.gather if not self._is_small else lambda numbers: (numbers, numbers)  # the device has them
        gathered: Any = gather(samples) if one_by_one is None else self._collated(fetched, numbers)
        augment_keys = keys(self.order.seed, "augment", epoch, draws) if is_training and self.is_augmented else None
        drawn: dict[str, Any] = {"keys": augment_keys}
        if is_training and self._knows_epochs:
            drawn |= {"epoch": epoch, "sample_keys": keys(self.order.seed, "augment in all epochs", 0, samples)}
        inputs, targets = map(as_tensors, gathered)
        stored = MicroBatch(part.number, inputs, targets, len(samples), part.start, drawn=drawn,
                            samples=numbers, split=self.split)  # fmt: skip
        return stored if self._later else self._transformed(stored, is_training=is_training)

    def _collated(self, fetched: list[Any], numbers: list[int]) -> Any:
        source: Any = self.source
        try:
            return source.collate(fetched)
        except Exception as error:
            some = ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")
            who = f"samples {some} of {self.split} do not make a batch (dataset.collate)"
            raise ValueError(f"{who}: {type(error).__name__}: {error}") from error

    def _transformed(self, stored: MicroBatch, *, is_training: bool) -> MicroBatch:
        if self._is_small:
            inputs, targets = self._on_device
            stored = stored._replace(inputs=inputs[stored.inputs], targets=targets[stored.targets])
        inputs, targets = self.dataset.transform(stored.inputs, stored.targets, **stored.drawn)
        if is_training and self.batch_transform is not None:
            inputs, targets = self.batch_transform(inputs, targets)
        return stored._replace(inputs=inputs, targets=targets, drawn={}).mapped(self._as_computed)

    @cached_property
    def _on_device(self) -> tuple[Tensor, Tensor]:
        """The samples of a small split, on the stream that uses them."""
        assert type(self.source) is Arrays
        return torch.tensor(self.source.inputs, device=self.device), torch.tensor(self.source.targets, device=self.device)

    def _as_computed(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or (tensor.dtype == self.dtype and not self.channels_last):
            return tensor
        order = torch.channels_last if self.channels_last and tensor.ndim == 4 else torch.preserve_format
        return tensor.to(self.dtype, memory_format=order)

    def _run(
        self, positions: Callable[[], Iterable[int]], fetch: Callable[[int], Step], *, is_evaluation: bool = False
    ) -> Iterator[Step]:
        if not self.num_workers:
            steps: Iterator[Step] = map(fetch, positions())
        elif is_evaluation and self._evaluating is not None:
            steps = self._read(iter(self._evaluating))
        else:
            if (earlier := self._running.pop(is_evaluation, None)) is not None:
                shut_down_loader(earlier)
            loader, begun = self._start_processes(positions, fetch)
            self._running[is_evaluation] = begun
            self._evaluating = loader if is_evaluation else self._evaluating
            steps = self._read(begun)
        if self.device.type == "cuda":
            finish = partial(self._transformed, is_training=False) if self._later else lambda micro_batch: micro_batch
            return map(partial(to_device, device=self.device, finish=finish, kept=self.keep_on_cpu), steps)
        return steps if self.device.type == "cpu" else map(self._to_device, steps)

    @staticmethod
    def _read(steps: Iterator[Step | RunEnded]) -> Iterator[Step]:
        for step in steps:
            if isinstance(step, RunEnded):
                raise step
            yield step

    def _start_processes(
        self, positions: Callable[[], Iterable[int]], fetch: Callable[[int], Step]
    ) -> tuple[DataLoader[int], Iterator[Step | RunEnded]]:
        """Return a loader and its first iterator. The processes serve the later iterators too."""
        open_files()
        wait_s = _FORK_S
        while True:
            begun = multiprocessing.get_context("fork").Semaphore(0)
            loader = self._loader(positions(), fetch, begun)
            with held_back():  # a signal to the whole group must not kill them
                steps = iter(loader)
            if all(begun.acquire(timeout=wait_s) for _ in range(self.num_workers)):
                return loader, steps
            # before 3.11.8, Python's child may hang if torch's threads use Python too (CPython issue 112275)
            kill_loader(steps)
            wait_s *= 2

    def _loader(self, positions: Iterable[int], fetch: Callable[[int], Step], begun: Semaphore) -> DataLoader[int]:
        def begin(_: int) -> None:
            begin_child()  # torch's watchdog checks every five seconds, and a queue may break earlier
            report_what_cannot_be_sent()
            begun.release()

        def fetched(position: int) -> Step | RunEnded:
            try:
                with exits_as_errors():
                    return fetch(position)
            except RunEnded as end:  # the reading process raises it: raised here, it would come as a traceback in a text
                return end

        return DataLoader(
            range(sys.maxsize),  # type: ignore[arg-type]  # item i is i: a position
            batch_size=None,
            sampler=positions,  # type: ignore[arg-type]  # endless: a sampler is any iterable, and its length is not read
            num_workers=self.num_workers,
            collate_fn=fetched,  # type: ignore[arg-type]  # without a batch size, it gets an item
            worker_init_fn=begin,
            pin_memory=self.device.type == "cuda",  # in a thread of the reading process
            multiprocessing_context="fork",
            persistent_workers=True,
        )

    def _to_device(self, step: Step) -> Step:
        there = [mapped_except(self.keep_on_cpu, m, lambda tensor: tensor.to(self.device)) for m in step.micro_batches]
        return step._replace(micro_batches=there)


def as_tensors(stored: Any) -> Any:
    """Return arrays in any tree as tensors that share their memory."""
    if isinstance(stored, np.ndarray):
        return torch.from_numpy(stored)
    if isinstance(stored, dict):
        return {name: as_tensors(value) for name, value in stored.items()}
    return type(stored)(map(as_tensors, stored)) if type(stored) in (tuple, list) else stored


@dataclass(eq=False)
class Splits:
    """One rank's loaders by split; `load` makes a loader when it is first used."""

    load: Callable[[Split], Loader]
    on_load: Callable[[Split, Source], None] = lambda split, source: None  # called when a split has been loaded
    fingerprints: dict[str, dict[str, str]] = field(default_factory=dict)  # of the splits that have been loaded
    validations: Callable[[], Sequence[Split]] = lambda: ("val",)  # only the loaded data of some datasets know them
    _loaders: dict[Split, Loader] = field(default_factory=dict, init=False)

    def loader(self, split: Split) -> Loader:
        """Return the loader of a split. Collective when it is first used."""
        if split not in self._loaders:
            self._loaders[split] = self.load(split)
            self.on_load(split, self._loaders[split].source)
        return self._loaders[split]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the data."""
        return {"data": self.fingerprints, "stream": self.loader("train").mark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a checkpoint's place in the training data."""
        self.fingerprints = state["data"] | self.fingerprints
        loader: Any = self.loader("train")
        loader.mark = state.get("stream", {})
        if hasattr(loader.source, "seek"):
            loader.source.seek(loader.mark)

    def close(self) -> None:
        """Stop the loaders' processes."""
        for loader in self._loaders.values():
            loader.close()
