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
    offer, descriptors = None, dict[str, int]()
    if source is not None:
        arrays = arrays_of(source)
        rest = {name: value for name, value in _fields(source).items() if name not in arrays}
        descriptors = {name: _memory_file(array) for name, array in arrays.items()}
        offer = type(source), rest, os.getpid(), descriptors
    kind, rest, pid, files = world.agreement.gather(offer)[world.first_on_node]
    mapped = {name: np.load(f"/proc/{pid}/fd/{file}", mmap_mode="r", allow_pickle=False) for name, file in files.items()}
    world.agreement.barrier()
    for descriptor in descriptors.values():
        os.close(descriptor)  # the mappings stay; the memory is freed with the last of them
    return kind(**rest, **mapped)


def arrays_of(source: Source) -> dict[str, np.ndarray]:
    """Return the fields of a source that are arrays in this process's memory: not mapped from a file."""
    arrays = {name: value for name, value in _fields(source).items() if isinstance(value, np.ndarray)}
    return {name: array for name, array in arrays.items() if not isinstance(array, np.memmap) and not array.dtype.hasobject}


def _fields(source: Source) -> dict[str, Any]:
    return {f.name: getattr(source, f.name) for f in dataclasses.fields(source)}  # type: ignore[arg-type]  # a Protocol cannot say "dataclass"


def _memory_file(array: np.ndarray) -> int:
    """Write an array to a file in memory without a name (no file can be left behind); return its descriptor."""
    descriptor = os.memfd_create("steadfast_data")
    with open(descriptor, "wb", closefd=False) as file:
        np.save(file, array, allow_pickle=False)
    return descriptor
