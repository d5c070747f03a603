"""One copy of a small dataset for all processes of a node: the first decodes it, the others map its memory."""

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
    for is_my_turn in (world.rank == 0, world.rank != 0):  # rank 0 before the other nodes: it may download the files
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
        offer.withdraw()  # the mappings stay; the memory is freed with the last of them
    return taken


@dataclasses.dataclass
class _Offer:
    """A source (a dataclass), taken apart. Its arrays are in memory files without a name: no file can be left behind."""

    kind: type[Source]
    rest: dict[str, Any]  # the fields that are not arrays
    pid: int
    descriptors: dict[str, int]  # of the files, by the arrays' names

    @classmethod
    def of(cls, source: Source) -> "_Offer":
        arrays = arrays_of(source)
        rest = {name: value for name, value in _fields(source).items() if name not in arrays}
        return cls(type(source), rest, os.getpid(), {name: _memory_file(array) for name, array in arrays.items()})

    def take(self) -> Source:
        """Return the source around a mapping of each array. In any process of the node."""
        paths = {name: f"/proc/{self.pid}/fd/{descriptor}" for name, descriptor in self.descriptors.items()}
        arrays = {name: np.load(path, mmap_mode="r", allow_pickle=False) for name, path in paths.items()}
        return self.kind(**self.rest, **arrays)

    def withdraw(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def arrays_of(source: Source) -> dict[str, np.ndarray]:
    """Return the fields of a source that are arrays in this process's memory: not mapped from a file."""
    arrays = {name: value for name, value in _fields(source).items() if isinstance(value, np.ndarray)}
    return {name: array for name, array in arrays.items() if not isinstance(array, np.memmap) and not array.dtype.hasobject}


def _fields(source: Source) -> dict[str, Any]:
    return {f.name: getattr(source, f.name) for f in dataclasses.fields(source)}  # type: ignore[arg-type]  # a Protocol cannot say "dataclass"


def _memory_file(array: np.ndarray) -> int:
    descriptor = os.memfd_create("steadfast_data")
    with open(descriptor, "wb", closefd=False) as file:
        np.save(file, array, allow_pickle=False)
    return descriptor
