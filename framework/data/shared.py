"""The load of a split: with the draws of the run's seed, and one copy of a small dataset for all processes of a node."""

import dataclasses
import os
from dataclasses import fields
from typing import Any

import numpy as np

from framework.data.source import Dataset, Source, Split
from framework.distributed.world import World
from framework.randomness import key, seeded


def load_split(dataset: Dataset, split: Split, *, seed: int) -> Source:
    """Load a split. Its draws depend only on the run's seed, so its samples do not depend on which split is used first.

    All splits get the same draws: disjoint parts of one permutation stay disjoint. ValueError if the dataset has a problem.
    """
    if problems := dataset.problems():
        raise ValueError(problems[0])
    with seeded(key(seed, "split")):
        return dataset.load(split)


def load_shared(dataset: Dataset, split: Split, *, seed: int, world: World) -> Source:
    """Load a split; on each node one process decodes it, and the other processes map its memory. Collective.

    A source that is not a dataclass has no fields to map; then each process loads it.
    """
    if world.world_size == 1:
        return load_split(dataset, split, seed=seed)
    source = None
    for is_my_turn in (world.rank == 0, world.rank != 0):  # rank 0 before the other nodes, because it may download the files
        if is_my_turn and world.local_rank == 0:
            source = load_split(dataset, split, seed=seed)
        world.agreement.barrier()
    if world.agreement.largest(world.local_world_size) == 1:  # nodes may have different numbers of processes
        assert source is not None
        return source
    offer, descriptors = None, dict[str, int]()
    if source is not None and dataclasses.is_dataclass(source):
        arrays = arrays_of(source)
        rest = {name: value for name, value in _fields(source).items() if name not in arrays}
        descriptors = {name: _memory_file(array) for name, array in arrays.items()}
        offer = type(source), rest, os.getpid(), descriptors
    offered = world.agreement.scatter_plan(
        (world.first_on_node, offer), lambda values: [values[first][1] for first, _ in values]
    )
    if offered is None:
        return load_split(dataset, split, seed=seed) if source is None else source
    kind, rest, pid, files = offered
    mapped = {
        name: np.load(f"/proc/{pid}/fd/{file}", mmap_mode="r", allow_pickle=False).view(np.ndarray)  # a file in memory
        for name, file in files.items()
    }
    world.agreement.barrier()
    for descriptor in descriptors.values():
        os.close(descriptor)  # the mappings stay; the memory is freed with the last mapping
    return kind(**rest, **mapped)


def arrays_of(source: Source) -> dict[str, np.ndarray]:
    """Return the fields of a source that are arrays in this process's memory, not mapped from a file."""
    arrays = {name: value for name, value in _fields(source).items() if isinstance(value, np.ndarray)}
    return {name: array for name, array in arrays.items() if not isinstance(array, np.memmap) and not array.dtype.hasobject}


def _fields(source: Source) -> dict[str, Any]:
    return {f.name: getattr(source, f.name) for f in fields(source)}  # type: ignore[arg-type]  # a Protocol cannot say "dataclass"


def _memory_file(array: np.ndarray) -> int:
    """Write an array to a file in memory without a name, so that no file can be left behind; return its descriptor."""
    descriptor = os.memfd_create("steadfast_data")
    with open(descriptor, "wb", closefd=False) as file:
        np.save(file, array, allow_pickle=False)
    return descriptor
