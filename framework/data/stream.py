"""Streams: an IterableDataset, a generator function or a streamed dataset of Hugging Face, unchanged.

The stream is the order of the samples. Every process reads all of it and keeps its own samples, so the number of processes, and
of their loader processes, changes nothing.
"""

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from framework.data.load import alone
from framework.data.map_style import SampleDataset, collated, has_index, unwrapped
from framework.data.source import SPLITS, Source, Split
from framework.randomness import key, seed_generators, seeded
from framework.runtime.exits import error_text
from framework.runtime.log import LOGGER

ENDLESS = 1 << 62  # samples: the length of a training stream that has none
_MANY = 10_000  # samples whose repeated reading is worth a line
_EVIDENCE = 64  # samples after a place that must be the same when a state leads there: one alone may be equal to another
_STARTS = 16  # samples at the start of a pass


@dataclass(kw_only=True, eq=False)
class Stream(SampleDataset):
    """A dataset whose splits are streams: the function for a split returns an iterable, or a new iterator at each call.

    An epoch is one pass, up to `length` samples. A training stream without a length is one endless epoch, in which the stream
    begins again when it ends. At each pass, its `set_epoch(number)` is called, if it has one.
    """

    train: Callable[[], Any]
    val: Callable[[], Any] | None = None
    test: Callable[[], Any] | None = None
    length: Mapping[str, int] = field(default_factory=dict)  # samples, by split

    def __post_init__(self) -> None:
        super().__post_init__()
        if odd := [name for name, count in self.length.items() if name not in SPLITS or count < 1]:
            raise ValueError(f"dataset.length.{odd[0]}: is not valid (a number of samples of train, val or test)")
        if self.val is None and "val" not in self.length:
            raise ValueError("dataset.val: is missing (a stream; or dataset.length.val=N, the first N samples of train)")

    def load(self, split: Split) -> Source:
        name = "val" if split == "test" and self.test is None else split
        make, skipped = {"train": self.train, "val": self.val, "test": self.test}[name], 0
        if self.val is None:
            make, skipped = make or self.train, self.length["val"] if name == "train" else 0
        assert make is not None  # the constructor has refused a missing val
        source = Streamed(self, make, split=name, skipped=skipped)
        if make is self.train and self.val is None and not source.begins_alike:
            what = "is missing, and each pass of train begins with other samples (it shuffles or draws)"
            raise ValueError(f"dataset.val: {what} (a stream of its own: another file, or take() and skip() before a shuffle)")
        return source


class Streamed:
    """A source that reads a stream. The number of a sample is its place, counted over all epochs."""

    is_stream = True

    def __init__(self, dataset: Stream, make: Callable[[], Any], *, split: str, skipped: int) -> None:
        """`skipped`: the samples at the start of each pass that belong to another split."""
        self._dataset, self._make, self._split, self._skipped = dataset, make, split, skipped
        self._seed = int(np.random.randint(0, 2**62))  # the run has seeded it
        self._made, collate = self._made_anew()
        if has_index(self._made):
            raise ValueError(f"dataset.{split}: a {type(self._made).__name__} has an index (dataset=map_style takes it)")
        if not hasattr(self._made, "__iter__"):
            what = f"a {type(self._made).__name__} is not iterable"
            raise ValueError(f"dataset.{split}: {what} (an IterableDataset, or a generator function)")
        self._collate = dataset.collate or collate
        self._process, self._mark, self._place = os.getpid(), dict[str, Any](), ENDLESS  # not begun
        self._pass, self._length, self._is_new = 0, ENDLESS, True
        self._items, self._held = iter(()), list[Any]()  # `_held`: the next samples, if they have been read
        self._next_mark: dict[str, Any] | None = None  # whose next samples are still read
        self._last_mark = dict[str, Any]()
        self._length = self._known_length()

    def _made_anew(self) -> tuple[Any, Any]:
        """Return the stream, as any process makes it, and its own collate function."""
        with seeded(key(self._seed, "make")), alone():
            made, collate = unwrapped(self._make(), key=f"dataset.{self._split}")
        self._initial = None  # the state of the stream before it is read, in a list
        if hasattr(made, "load_state_dict"):
            with suppress(Exception):
                self._initial = [copy.deepcopy(made.state_dict())]
        return made, collate

    def _known_length(self) -> int:
        if (declared := self._dataset.length.get(self._split)) is not None:
            return declared
        count = ENDLESS
        with suppress(TypeError, NotImplementedError):
            count = len(self._made) - self._skipped
        if count == ENDLESS and self._split != "train":
            LOGGER.info("dataset.%s: its samples are counted (dataset.length.%s=N saves this)", self._split, self._split)
            self._go_back(0)
            while self._pass == 0:
                self._read()
            count, self._place = self._place - 1, ENDLESS
        if count < 1:
            raise ValueError(f"dataset.{self._split}: has no sample")
        return count

    @property
    def begins_alike(self) -> bool:
        """Whether two passes begin with the same samples."""
        starts, skipped, self._skipped = list[list[str]](), self._skipped, 0
        for number in range(2):
            self._begin_pass(number, at=0)
            with alone():
                starts.append([*map(_text_of, islice(self._items, _STARTS))])
        self._skipped, self._place = skipped, ENDLESS
        return starts[0] == starts[1]

    def __len__(self) -> int:
        return self._length

    def sample(self, number: int) -> Any:
        """Return a sample. A number that is lower than the last one makes the stream begin again."""
        self._go_to(number)
        return self._read()

    def gather(self, indices: np.ndarray) -> tuple[Any, Any]:
        return self.collate([self.sample(int(index)) for index in indices])

    def collate(self, samples: list[Any]) -> tuple[Any, Any]:
        return collated(samples, self._collate, inputs=self._dataset.inputs, targets=self._dataset.targets)

    def mark(self, number: int) -> dict[str, Any]:
        """Return a place at or before a sample: the latest whose state is known together with many samples after it.

        It consists of plain values. Empty: there is none, because the stream has no state or has just begun.
        """
        self._go_to(number)
        if self._next_mark is not None and len(self._next_mark["next"]) >= _EVIDENCE:
            self._last_mark, self._next_mark = self._next_mark, None
        if self._next_mark is None and self._initial is not None and not self._held and number % self._length:
            with suppress(TypeError, ValueError):  # a state that JSON cannot hold
                state = json.loads(json.dumps(self._made.state_dict()))
                self._next_mark = {"place": number, "pass": self._pass, "state": state, "next": []}
        return self._last_mark

    def seek(self, mark: dict[str, Any]) -> None:
        """Continue from a mark, if that saves reading the samples before it."""
        self._mark, self._place = mark, ENDLESS

    def _go_to(self, number: int) -> None:
        if self._process != os.getpid() or number < self._place:
            self._go_back(number)
        while self._place < number:
            self._read()

    def _go_back(self, number: int) -> None:
        """Begin again before a sample: at the mark, or at the start of its epoch."""
        from framework.runtime.torch_internals import forget_loader_process

        if self._process != os.getpid():  # an open file, a shared counter: what has been forked belongs to both processes
            forget_loader_process()
            self._process, (self._made, _) = os.getpid(), self._made_anew()
        epoch, mark, self._next_mark = number // self._length, self._mark, None
        if mark and epoch * self._length < mark["place"] <= number:
            with suppress(Exception):  # of code that takes the state
                self._begin_pass(mark["pass"], at=mark["place"], state=mark["state"])
                samples = [self._read() for _ in mark["next"]]
                if list(map(_text_of, samples)) == mark["next"]:
                    self._held, self._place = samples, mark["place"]
                    return
            what = "its state does not lead to the next samples: the buffer of a shuffle, for example, is not in it"
            LOGGER.info("dataset.%s: %s", self._split, what)
            self._mark = {}
        self._begin_pass(epoch if self._length != ENDLESS else 0, at=epoch * self._length)
        if number - self._place >= _MANY:
            LOGGER.info("dataset.%s: %d samples are read again, to continue after them", self._split, number - self._place)

    def _begin_pass(self, number: int, *, at: int, state: Any = None) -> None:
        self._pass, self._place, self._held, self._is_new = number, at, [], True
        if self._initial is not None:  # a stream with a state goes on from where it is
            self._made.load_state_dict(copy.deepcopy(self._initial[0]))  # the stream may go on to work in it
        if hasattr(self._made, "set_epoch"):
            self._made.set_epoch(number)
        if state is not None:
            self._made.load_state_dict(state)
        seed_generators(key(self._seed, self._split, "pass", number))
        with alone():
            self._items = self._made if isinstance(self._made, Iterator) else iter(self._made)
            for _ in range(self._skipped if state is None else 0):
                next(self._items, None)
        if isinstance(self._made, Iterator):  # it can be read once
            self._made, _ = self._made_anew()

    def _read(self) -> Any:
        """Return the next sample."""
        if self._held:
            self._place += 1
            return self._held.pop(0)
        if self._place % self._length == 0 and not self._is_new:
            self._begin_pass(self._place // self._length, at=self._place)
        while True:
            seed_generators(key(self._seed, self._split, self._place))
            try:
                with alone():
                    sample: Any = next(self._items)
            except StopIteration:
                self._begin_pass(self._next_pass(), at=self._place)
                continue
            except Exception as error:
                raise ValueError(f"sample {self._place} of {self._split}: {error_text(error)}") from error
            if sample is None:
                raise ValueError(f"sample {self._place} of {self._split}: it is None (leave it out of the stream)")
            self._place, self._is_new = self._place + 1, False
            if self._next_mark is not None and len(self._next_mark["next"]) < _EVIDENCE:
                self._next_mark["next"].append(_text_of(sample))
            return sample

    def _next_pass(self) -> int:
        """Return the number of the next pass of an endless stream. ValueError if there can be none."""
        if self._is_new:
            raise ValueError(f"dataset.{self._split}: has no sample")
        if self._length != ENDLESS:
            what = f"the stream has ended before sample {self._place % self._length} of {self._length}"
            raise ValueError(f"dataset.{self._split}: {what} (dataset.length.{self._split})")
        return self._pass + 1


def _text_of(sample: Any) -> str:
    from framework.data.fingerprint import of_sample  # it imports torch

    return of_sample(sample)


def noted(steps: Iterator[Any], loader: Any) -> Iterator[Any]:
    """Yield steps, and keep the mark of the last one for a checkpoint."""
    for step in steps:
        loader.mark = step.mark or loader.mark
        yield step
