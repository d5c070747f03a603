"""The data of a LightningDataModule: the datasets of its loaders, in the order and the batches of the run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from extras.from_lightning.packages import is_of_lightning, lightning_class
from framework.data.map_style import MapStyle, has_index
from framework.data.source import SPLITS, NotNegative, Source, Split
from framework.data.stream import Stream
from framework.randomness import key, seeded
from framework.runtime.exits import Unfit

_HOOKS = ("on_after_batch_transfer", "on_before_batch_transfer", "transfer_batch_to_device")


@dataclass(kw_only=True, eq=False)
class DataModule:
    """The datasets and collate functions of the loaders of a LightningDataModule. Without a loader of its own, test has the
    samples of val, and val those of train. The further loaders of a val_dataloader are the splits val.1, val.2, ...

    The run chooses the order and the number of workers. Its global batch has the size of the loader's batches. An
    IterableDataset is a stream, in its own order; `length` are the samples of its splits.
    """

    module: Callable[[], Any]
    global_batch_size: NotNegative
    drop_last: bool
    sampler: str | None = None  # the target of the run's sampler
    length: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, int] = field(default_factory=dict)
    num_workers: NotNegative = 0

    @cached_property
    def made(self) -> Any:
        """The LightningDataModule, which has prepared its data."""
        made = self.module()
        data = lightning_class(type(made), "LightningDataModule")
        if (base := data or lightning_class(type(made), "LightningModule")) is None:
            raise ValueError(f"dataset.module: a {type(made).__name__} (a LightningDataModule)")
        self._base = base
        own = {name for base in type(made).__mro__ if not is_of_lightning(base) for name in vars(base)}
        if odd := sorted(own.intersection(_HOOKS)):
            raise ValueError(f"dataset.module: overrides {', '.join(odd)}, which is not called (the module can override it)")
        made.prepare_data()
        made.setup("fit")
        if state := made.state_dict() if data is not None else {}:  # that of a LightningModule has its weights
            raise ValueError(f"dataset.module: its state_dict has {', '.join(map(str, state))}, but the run orders the samples")
        return made

    @property
    def info(self) -> Mapping[str, int]:
        return self.facts

    @cached_property
    def validations(self) -> list[Split]:
        """The names of the validation splits. This prepares the data."""
        loaders = _loaders(self.made, "val") if self._has_own("val") else []
        return ["val", *(f"val.{number}" for number in range(1, len(loaders)))]

    def problems(self) -> list[str]:
        return []

    def load(self, split: Split) -> Source:
        """Prepare the data, and load a split. ValueError for loaders that the run's order would change in another way."""
        made = self.made
        if split == "test":
            made.setup("test")
        elif split.startswith("val.") and split not in self.validations:
            raise Unfit(f"{split}: is no split of this dataset (one of train, {', '.join(self.validations)}, test)")
        split, _, name = split.partition(".")
        number, own = int(name or 0), [name for name in SPLITS if self._has_own(name)]
        loader = self._loader(next(name for name in (split, "val", "train") if name in own or name == "train"), number)
        makes: dict[Any, Any] = {name: partial(self._dataset, name, number) for name in own}
        if has_index(loader.dataset):  # a stream of train may have no end
            makes.setdefault("val", makes["train"])
        if "val" in makes:
            makes.setdefault("test", makes["val"])
        collate = partial(_whole_batch, loader.collate_fn)
        if not has_index(loader.dataset):
            return Stream(**makes, length=self.length, collate=collate).load(split)
        source = MapStyle(**makes, collate=collate).load(split)
        source.own_sampler = lambda: self._loader("train", 0).sampler  # type: ignore[attr-defined]
        return source

    def transform(self, inputs: Any, targets: Any, *, keys: Any) -> tuple[Any, Any]:
        return inputs, targets

    def _has_own(self, split: Split) -> bool:
        name = f"{split}_dataloader"
        return getattr(type(self.made), name) is not getattr(self._base, name)

    def _dataset(self, split: Split, number: int) -> Any:
        return self._loader(split, number).dataset

    def _loader(self, split: Split, number: int) -> Any:
        loaders, name = _loaders(self.made, split), f"dataset.module: {split}_dataloader"
        if len(loaders) != 1 and (split != "val" or not loaders):
            raise ValueError(f"{name} returns {len(loaders)} loaders (one; only val_dataloader may return several)")
        loader = loaders[number]
        if not hasattr(loader, "collate_fn"):
            raise ValueError(f"{name} returns a {type(loader).__name__} (a torch.utils.data.DataLoader)")
        if split == "train" and loader.batch_size != self.global_batch_size:
            what = f"its batches have {loader.batch_size} samples, and those of the run {self.global_batch_size}"
            raise ValueError(f"{name}: {what} (global_batch_size={loader.batch_size or 'N'})")
        is_ordered = type(loader.sampler).__name__ in ("RandomSampler", "SequentialSampler") or not has_index(loader.dataset)
        if not is_ordered and (split != "train" or self.sampler is None):
            remedy = "sampler=lightning" if split == "train" else "a torch.utils.data.Subset as the loader's dataset"
            raise ValueError(f"{name}: has a {type(loader.sampler).__name__}, but the run orders its samples ({remedy})")
        if loader.drop_last and (split != "train" or not self.drop_last):
            remedy = "drop_last=true" if split == "train" else "without it: an evaluation counts each sample"
            raise ValueError(f"{name}: drops its last batch, but the run does not ({remedy})")
        return loader


class LoaderSampler:
    """A sampler of the run: that of a LightningDataModule's train_dataloader, with draws that depend on the epoch."""

    def epoch(self, epoch: int, *, source: Any, seed: int) -> np.ndarray:
        if (make := getattr(source, "own_sampler", None)) is None:
            raise ValueError("sampler: the samples are not those of a train_dataloader (dataset=lightning, without folds)")
        draws = key(seed, "loader", epoch)
        with seeded(draws):
            sampler = make()
            if getattr(sampler, "generator", None) is not None:
                sampler.generator.manual_seed(draws)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            return np.asarray([*sampler])


def _loaders(made: Any, split: Split) -> list[Any]:
    found = getattr(made, f"{split}_dataloader")()
    return [*found.values()] if isinstance(found, Mapping) else [*found] if isinstance(found, (list, tuple)) else [found]


def _whole_batch(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[Any, Any]:
    """Return the parts of a batch as its loader makes it; if it is no pair, all of it as the one argument of the model."""
    from torch import Tensor

    batch = collate(samples)
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and batch[1] is not None:
        return batch[0], batch[1]  # because mode=predict needs the inputs alone
    return batch if isinstance(batch, Tensor) else (batch,), None
