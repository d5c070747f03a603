"""Map-style data: any torch.utils.data.Dataset, any dataset of Hugging Face, or any sequence of samples, unchanged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import numpy as np

from framework.data.source import NotNegative, Source, Split
from framework.randomness import permutation
from framework.runtime.log import LOGGER

Key = str | int  # of a value in a sample: a name, or an index
Keys = Key | Sequence[Key] | None


@dataclass(kw_only=True, eq=False)
class SampleDataset:
    """The common base of datasets of samples that anybody has written: what of a sample is used, and how a batch is made."""

    inputs: Keys = None
    targets: Keys = None
    collate: Any = None  # turns a list of samples into a batch; None = torch's default
    facts: Mapping[str, int] = field(default_factory=dict)
    num_workers: NotNegative = 0

    def __post_init__(self) -> None:
        if self.inputs is None and self.targets is not None:
            raise ValueError("dataset.targets needs dataset.inputs, too: keys of a sample, or null for pairs")
        for split in ("train", "val", "test"):
            if isinstance(text := getattr(self, split, None), str):
                raise ValueError(f"dataset.{split}: is the text {text}, and no node (dataset.{split}._target_={text})")

    @property
    def info(self) -> Mapping[str, int]:
        return self.facts

    def problems(self) -> list[str]:
        return []

    def transform(self, inputs: Any, targets: Any, *, keys: np.ndarray | None) -> tuple[Any, Any]:
        return inputs, targets


@dataclass(kw_only=True, eq=False)
class MapStyle(SampleDataset):
    """A dataset with samples `dataset[i]`: inputs and targets, or a mapping or sequence with the keys `inputs` and `targets`.

    The function for a split (`train`, ...) is called when the split is loaded. If `val` or `test` is missing, it is a share of
    train, with the same samples for every seed. Random draws of `dataset[i]` from torch, numpy or random depend only on the
    seed, the epoch and i. `set_epoch(epoch)` of the training dataset is called before its samples are fetched, if it has one.
    """

    train: Callable[[], Any]
    val: Callable[[], Any] | None = None
    test: Callable[[], Any] | None = None
    shares: Mapping[str, float] = field(default_factory=lambda: {"val": 0.1, "test": 0.1})  # of train, for a missing split
    on_error: Literal["raise", "skip"] = "raise"  # for a damaged sample: skip uses the next sample instead

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares.keys() - {"val", "test"} or not 0 < sum(self.shares.values()) < 1:
            raise ValueError(f"dataset.shares={dict(self.shares)}: must be shares of val and test, less than 1 together")

    def load(self, split: Split) -> Source:
        make = {"train": self.train, "val": self.val, "test": self.test}[split]
        made = self.train if make is None else make
        made = made() if callable(made) and not hasattr(made, "__getitem__") else made
        samples, collate = unwrapped(made, key=f"dataset.{split}")
        if not has_index(samples):
            raise ValueError(f"dataset.{split}: a {type(samples).__name__} has no length or no index (dataset=stream takes it)")
        numbers = self._carved(split, len(samples))
        if len(samples if numbers is None else numbers) == 0:
            carved = f" left: dataset.shares carves {len(samples)} out of train" if len(samples) else ""
            raise ValueError(f"dataset.{split}: has no sample{carved}")
        source = OneByOne(self, samples, numbers, split=split, collate=self.collate or collate)
        if (split == "train" or make is None) and callable(set_epoch := getattr(samples, "set_epoch", None)):
            set_epoch(0)  # a notebook's object may be in a later one
            source.begin_epoch = set_epoch  # type: ignore[attr-defined]
        return source

    def _carved(self, split: Split, length: int) -> np.ndarray | None:
        """Return the numbers of the split's samples among the samples of train; None if the split has its own samples."""
        missing = [name for name, make in (("val", self.val), ("test", self.test)) if make is None]
        if not missing or split not in ("train", *missing):
            return None
        order, parts, start = permutation(length), dict[str, np.ndarray](), 0
        for name in missing:
            end = start + max(1, round(self.shares.get(name, 0.1) * length))
            parts[name], start = order[start:end], end
        return np.sort(parts.get(split, order[start:]))


class OneByOne:
    """A source that fetches samples one by one with `sample(i)`; `collate` makes a batch of several samples."""

    def __init__(self, dataset: MapStyle, samples: Any, numbers: np.ndarray | None, *, split: str, collate: Any) -> None:
        """`numbers` are those of the split's samples among the samples; None: all."""
        self._dataset, self.samples, self._numbers, self._split, self._collate = dataset, samples, numbers, split, collate
        self._skips = dataset.on_error == "skip"

    def __len__(self) -> int:
        return len(self.samples) if self._numbers is None else len(self._numbers)

    def gather(self, indices: np.ndarray) -> tuple[Any, Any]:
        return self.collate([self.sample(int(index)) for index in indices])

    def sample(self, index: int) -> Any:
        """Return a sample. If it is damaged: ValueError that names it; with `on_error=skip`, a warning and the next one."""
        for number in (*range(index, len(self)), *range(index)):
            stored = number if self._numbers is None else int(self._numbers[number])
            try:
                sample = self.samples[stored]
                if sample is None and (self._skips or self._collate is None):
                    raise TypeError("it is None")
                return sample
            except Exception as error:
                what = f"sample {stored} of {self._split}: {type(error).__name__}: {error}"
                if not self._skips:
                    raise ValueError(f"{what} (dataset.on_error=skip takes the next one in its place)") from error
                LOGGER.warning("%s: skipped", what)
        raise ValueError(f"dataset.{self._split}: every sample is damaged")

    @property
    def num_stored(self) -> int:
        """The number of samples in the dataset, of which this split may have a part."""
        return len(self.samples)

    def stored(self, indices: np.ndarray) -> np.ndarray:
        """Return the numbers that samples of this split have in the dataset."""
        return indices if self._numbers is None else self._numbers[indices]

    def collate(self, samples: list[Any]) -> tuple[Any, Any]:
        """Return the inputs and targets of these samples."""
        return collated(samples, self._collate, inputs=self._dataset.inputs, targets=self._dataset.targets)

    def column(self, name: str) -> np.ndarray:
        """Return a value of every sample, by its key; the key `targets` means dataset.targets.

        It uses a table's column, or an attribute of the dataset with a value for every sample, if there is one.
        """
        targets: Any = self._dataset.targets
        key: Any = name if name != "targets" else 1 if targets is None else targets
        if key in (getattr(self.samples, "column_names", None) or ()):
            values: Any = self.samples[key]
        else:  # torchvision's datasets keep their targets in an attribute
            values = getattr(self.samples, name, None) if name != "targets" or targets is None else None
            if not hasattr(values, "__len__") or np.ndim(values) != 1 or len(values) != len(self.samples):
                return np.asarray([self.sample(number)[key] for number in range(len(self))])
        return np.asarray(values) if self._numbers is None else np.asarray(values)[self._numbers]

    @property
    def groups(self) -> np.ndarray:
        """The ends of consecutive groups of samples (`ConcatDataset`); without groups, the end of all samples."""
        ends = getattr(self.samples, "cumulative_sizes", None)
        if ends is None:
            return np.array([len(self)])
        return np.asarray(ends) if self._numbers is None else np.searchsorted(self._numbers, ends)


def has_index(samples: Any) -> bool:
    from torch.utils.data import Dataset  # its own __getitem__, which every IterableDataset inherits, only raises

    method = getattr(type(samples), "__getitem__", None)
    return method not in (None, Dataset.__getitem__) and hasattr(samples, "__len__")


def unwrapped(made: Any, *, key: str) -> tuple[Any, Any]:
    """Return what a DataLoader reads, and its collate function; of anything else, itself and None.

    ValueError if the loader has an order of its own.
    """
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

    if not isinstance(made, DataLoader):
        return made, None
    order, known = [type(made.batch_sampler), type(made.sampler)], (BatchSampler, RandomSampler, SequentialSampler, type(None))
    if has_index(made.dataset) and (odd := [kind for kind in order if kind not in known]):
        raise ValueError(f"{key}: its loader has a {odd[0].__name__}, but the run orders its samples (sampler=...)")
    return made.dataset, made.collate_fn if made.batch_size is not None else None


def collated(samples: list[Any], collate: Any, *, inputs: Keys, targets: Keys) -> Any:
    """Return the inputs and targets of a batch of these samples, by their keys; without keys, a pair is both.

    With keys of the inputs alone, or without keys and no pair, it has no targets: a model may compute its own loss.
    """
    from torch import Tensor

    batch = (collate or default_collate)(samples)
    if is_dataclass(batch) and not isinstance(batch, Mapping):
        batch = {one.name: getattr(batch, one.name) for one in fields(batch)}
    if inputs is not None:
        return _chosen(batch, inputs), None if targets is None else _chosen(batch, targets)
    if isinstance(batch, (tuple, list)):
        return tuple(batch) if len(batch) == 2 else (tuple(batch), None)
    return (batch if isinstance(batch, (Mapping, Tensor)) else (batch,)), None


def _chosen(batch: Any, keys: Key | Sequence[Key]) -> Any:
    """Return a batch's value of a key; for several names a dictionary (for named arguments); for several indices a tuple."""
    if isinstance(keys, (str, int)):
        return batch[keys]
    chosen = {key: batch[key] for key in keys}
    return chosen if all(isinstance(key, str) for key in chosen) else tuple(chosen.values())


def default_collate(samples: list[Any]) -> Any:
    """Collate as torch does, but treat a list of numbers in a sample as an array."""
    from torch.utils.data import default_collate as collate

    return collate([_with_arrays(sample) for sample in samples])


def _with_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_arrays(item) for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, (int, float, list)) for item in value):
        array = np.asarray(value)
        return value if array.dtype.hasobject else array
    return tuple(map(_with_arrays, value)) if type(value) is tuple else value
