"""The data of a run: the fingerprints of its splits, which each start compares with those in the run's checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from framework.build.sources import Sources
from framework.config.schema import Node, RunSection, targets_in
from framework.config.trainer import TrainerSection
from framework.data.fingerprint import changes, fingerprint
from framework.data.load import load_split
from framework.data.source import Source, Split
from framework.runs.provenance import Provenance
from framework.runtime.exits import Unfit, headline
from framework.runtime.log import LOGGER

if TYPE_CHECKING:
    from framework.data.loader import Splits
    from framework.distributed.world import World

_WAYS = ("restore the data; or run.data=accept continues and records the change, run.resume=never starts over, "
         "model.init_from=FILE loads only the weights")  # fmt: skip


@dataclass(eq=False)
class DataRecord:
    """The record of a run's data: it notes each split when it is loaded. Collective; rank 0 alone reads the data."""

    run: RunSection
    provenance: Provenance
    world: "World"
    seed: int
    splits: "Splits"
    _before: Mapping[str, dict[str, str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.note("train", self.splits.loader("train").source)
        self.splits.on_load = self.note

    def note(self, split: Split, source: Source) -> None:
        """Record a split that has been loaded. Unfit if it is another one than in the checkpoint."""
        order = self.splits.loader("train").order
        drawn = order if split == "train" and order.draw is not None else None
        found = self.world.agreement.on_rank_0(lambda: fingerprint(source, seed=self.seed, order=drawn))
        self.splits.fingerprints[split] = found
        self._compare(split)

    def expect(self, before: Mapping[str, dict[str, str]]) -> None:
        """Compare the splits with a checkpoint's, now, so that other data are found before a step."""
        self._before = before
        self._compare("train")
        for split in before:
            self.splits.loader(split)

    def _compare(self, split: str) -> None:
        before, now, accepted = self._before.get(split), self.splits.fingerprints[split], list[str]()
        if before is not None:
            accepted = _accepted(self.run, split, before, now)
            if not accepted and self.world.rank == 0 and (lines := changes(before, now, but_for_rounding=False)):
                what = "another machine has rounded them, or a few numbers have changed"
                LOGGER.warning("the data of %s are not quite those of the checkpoint: %s: %s", split, "; ".join(lines), what)
        if self.world.rank == 0:
            self.provenance.add_data(split, now, accepted=accepted)


def require_recorded(run: RunSection, dataset: Node, trainer: TrainerSection, seed: int) -> None:
    """Compare the data with the record of a finished run. Unfit if they are others; data that are gone are no others."""
    if not all(target.startswith("framework.") for target in targets_in({"dataset": dataset})):
        import torch  # noqa: F401  # the draws of the user's code may be torch's: it must be there to be seeded

    provenance = Provenance(Path(run.dir))
    sources = Sources(dataset, seed=seed, load=partial(load_split, seed=seed))
    for split in dict.fromkeys(split for start in provenance.read().starts for split in start.data):
        before = provenance.data(split)
        try:
            stored = split if trainer.overfit_batches is None else "train"
            now = fingerprint(sources.source(stored), seed=seed)
        except Exception as error:  # of the user's code or files
            LOGGER.warning("the data cannot be compared with those of the finished run: %s", headline(error))
            return
        if accepted := _accepted(run, split, before, now):
            provenance.add_data(split, now, accepted=accepted)


def _accepted(run: RunSection, split: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the changes of a split, which the user accepts. Unfit if the user does not."""
    lines = changes(before, now, but_for_rounding=True)
    if lines and run.data != "accept":
        raise Unfit(f"run.data: the data are not those of the checkpoint: {split}: {'; '.join(lines)} ({_WAYS})")
    return lines
