"""One copy of a small dataset for all processes of a node: decoded by the first, mapped by the others."""

import dataclasses
import os
from typing import Any

import numpy as np

from framework.data.source import Dataset, Source, Split
from framework.distributed.world import World


def load_shared(dataset: Dataset, split: Split, *, world: World) -> Source:
    """Load a split; on each node one process decodes it and the others map its memory. Collective."""
    if world.world_size == 1:
        return dataset.load(split)
    source = None
    for is_my_turn in (world.rank == 0, world.rank != 0):  # rank 0 before the other nodes: it may be downloading
        if is_my_turn and world.local_rank == 0:
            source = dataset.load(split)
        world.agreement.barrier()
    if world.local_world_size == 1:
        assert source is not None
        return source
    offer = _Offer.of(source) if source is not None else None
    taken = world.agreement.gather(offer)[world.first_on_node].take()
    world.agreement.barrier()
    if offer is not None:
        offer.withdraw()  # the mappings live on, and the memory goes with the last of them
    return taken


@dataclasses.dataclass
class _Offer:
    """A source (a dataclass) taken apart. Its arrays lie in memory files without a name: there is none to be left behind."""

    kind: type[Source]
    rest: dict[str, Any]  # the fields that are not arrays
    pid: int
    descriptors: dict[str, int]  # of the files, by the arrays' names

    @classmethod
    def of(cls, source: Source) -> "_Offer":
        arrays = source.arrays
        rest = {f.name: getattr(source, f.name) for f in dataclasses.fields(source) if f.name not in arrays}  # type: ignore[arg-type]  # a Protocol cannot say "dataclass"
        return cls(type(source), rest, os.getpid(), {name: _memory_file(array) for name, array in arrays.items()})

    def take(self) -> Source:
        """Put the source together around a mapping of each array. In any process of the node."""
        paths = {name: f"/proc/{self.pid}/fd/{descriptor}" for name, descriptor in self.descriptors.items()}
        arrays = {name: np.load(path, mmap_mode="r", allow_pickle=False) for name, path in paths.items()}
        return self.kind(**self.rest, **arrays)

    def withdraw(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def _memory_file(array: np.ndarray) -> int:
    descriptor = os.memfd_create("steadfast_data")
    with open(descriptor, "wb", closefd=False) as file:
        np.save(file, array, allow_pickle=False)
    return descriptor
