"""The data of a run: the fingerprints of its splits, which each start compares with those in the run's checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from framework.config.schema import RunSection
from framework.data.fingerprint import differences, fingerprint
from framework.data.source import Source, Split
from framework.distributed.world import World
from framework.runs.provenance import Provenance
from framework.runtime.exits import Unfit
from framework.runtime.log import LOGGER

_WAYS = ("restore the data; or run.data=accept continues and records the change, run.resume=never starts over, "
         "model.init_from=FILE loads only the weights")  # fmt: skip


@dataclass(eq=False)
class DataRecord:
    """The fingerprints of a run's splits. Every method is collective; rank 0 alone reads the data."""

    run: RunSection
    provenance: Provenance
    world: World
    seed: int
    found: dict[str, dict[str, str]]  # by split; each checkpoint holds it
    _before: Mapping[str, dict[str, str]] = field(default_factory=dict, init=False)

    def note(self, split: Split, source: Source) -> None:
        """Record a split that has been loaded. Unfit if it is another one than in the checkpoint."""
        self.found[split] = self.world.agreement.on_rank_0(lambda: fingerprint(source, seed=self.seed))
        self._compare(split)

    def expect(self, before: Mapping[str, dict[str, str]]) -> None:
        """Compare the splits with a checkpoint's: those that are loaded, and each that will be."""
        self._before = before
        for split in self.found:
            self._compare(split)

    def _compare(self, split: str) -> None:
        before, now, accepted = self._before.get(split), self.found[split], list[str]()
        if before is not None and (lines := differences(before, now, but_for_rounding=True)):
            if self.run.data != "accept":
                raise Unfit(f"run.data: the data are not those of the checkpoint: {split}: {'; '.join(lines)} ({_WAYS})")
            accepted = lines
        elif before is not None and self.world.rank == 0 and (lines := differences(before, now, but_for_rounding=False)):
            what = "another machine has rounded them, or a few numbers have changed"
            LOGGER.warning("the data of %s are not quite those of the checkpoint: %s: %s", split, "; ".join(lines), what)
        if self.world.rank == 0:
            self.provenance.add_data(split, now, accepted=accepted)
