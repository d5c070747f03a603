"""The samples that a rehearsal fetches from the training split, and what they show about the data."""

import time
from typing import Any

from torch import Tensor

from framework.build.training import Builder
from framework.config.code import own_modules
from framework.data.loader import Loader
from framework.engine.seam import Step
from framework.modules.tensors import tensors_in
from framework.preflight.differences import same
from framework.preflight.findings import Refused, blamed

KEYED = "from torch, numpy.random or random directly"  # the run seeds these generators
_DEEP = 3  # the depth of nested objects, for example a dataset in a dataset
_AHEAD, _AHEAD_S = 40, 0.2  # steps and seconds before the first step is fetched again


class TrainingSamples:
    """The first steps of a run, on one process. Each method raises Refused for data that no run could repeat."""

    def __init__(self, build: Builder) -> None:
        self._build = build
        with blamed("dataset", "its training split cannot be loaded", "see dataset.*"):
            self._source = build.dataset.load("train")

    def _loader(self) -> Loader:
        with blamed("sampler", "it cannot order this data", "see sampler.*"):
            loader = self._build.loader(self._source, "train", dp_rank=0, dp_size=1)
        loader.num_workers = 0
        return loader

    def fetch(self, count: int) -> list[Step]:
        """Return so many steps."""
        loader, before = self._loader(), self._counts()
        with blamed("dataset", "its first batch cannot be fetched", "see dataset.*"):
            steps = loader.train(0)
            fetched, again = [next(steps) for _ in range(count)], next(loader.train(0))
            until = time.monotonic() + _AHEAD_S
            for _ in range(_AHEAD):  # a counter may have an effect later
                if time.monotonic() < until:
                    next(steps)
            late = next(loader.train(0))
        if any(not _equal(fetched[0], other) for other in (again, late)):
            what = "the same samples differ each time: it draws from its own generator, or counts"
            raise Refused("dataset", what, f"draw {KEYED}, or from the `keys` of transform()")
        for name, value in self._counts().items():
            if value != before.get(name, value):
                what = f"{name} changes when samples are fetched, and no checkpoint holds it"
                raise Refused("dataset", what, "let a sample depend only on its number and on `keys`")
        return fetched

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

        look(self._source, "", 0)
        look(self._build.dataset, "", 0)
        return found

    def later(self) -> list[Tensor]:
        """Return the first step's samples as they are in the next epoch."""
        with blamed("dataset", "its first batch cannot be fetched in another epoch", "see dataset.*"):
            return _tensors(self._loader().train_step(0, later=1))

    def compare(self, others: list[Tensor]) -> None:
        """Refuse data with a memory; `others` is the result of `later` in a process that has fetched nothing before."""
        if any(not same(*pair) for pair in zip(self.later(), others)):
            what = "a sample depends on the samples before: it keeps its draws, or counts"
            raise Refused("dataset", what, "keep only stored data, and draw each time")

    @property
    def draw_for_micro_batches(self) -> bool:
        """Whether a collate function or a transform of batches draws random numbers for a whole micro-batch."""
        loader = self._loader()
        one, other = (loader.train_step(0, first=first) for first in (0, 1))
        return not _equal(one, other)


def _equal(one: Step, other: Step) -> bool:
    mine, theirs = _tensors(one), _tensors(other)
    return len(mine) == len(theirs) and all(map(same, mine, theirs))


def _tensors(step: Step) -> list[Tensor]:
    return tensors_in([(micro_batch.inputs, micro_batch.targets) for micro_batch in step.micro_batches])
