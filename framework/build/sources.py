"""The splits of a run's dataset as sources, with the folds and the further validation sets. This imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from framework.build import components, splits
from framework.config.schema import Node
from framework.data.source import Dataset, Source, Split
from framework.randomness import key, seeded


@dataclass(eq=False)
class Sources:
    """A loader of the splits of a dataset's node. `load` reads one split of a dataset; it may be collective."""

    node: Node
    seed: int
    load: Callable[[Dataset, Split], Source]

    @cached_property
    def dataset(self) -> Dataset:
        with seeded(key(self.seed, "split")):
            return components.dataset(self.node)

    def source(self, split: Split) -> Source:
        """Load a split. With folds, `val` is one fold of the training samples, and `train` has the others."""
        if split.startswith("val.") and not hasattr(self.dataset, "validations"):
            return self.load(components.dataset(splits.validation(self.node, split)), "val")
        if (fold := components.fold_of(self.node)) is None or split not in ("train", "val"):
            return self.load(self.dataset, split)
        return splits.in_fold(self._all_folds, split, number=fold[0], count=fold[1])

    @cached_property
    def _all_folds(self) -> Source:
        return self.load(self.dataset, "train")
