"""One copy of a small dataset for all processes of a node: decoded by the first, mapped by the others."""

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from framework.data.source import Dataset, Source, Split
from framework.world import World

_SHARED_MEMORY = Path("/dev/shm")


def load_shared(dataset: Dataset, split: Split, *, world: World) -> Source:
    """Load a split; on each node one process decodes it and the others map its memory. Collective."""
    if world.world_size == 1:
        return dataset.load(split)
    source = None
    for is_my_turn in (world.rank == 0, world.rank != 0):  # rank 0 before the other nodes: it may be downloading
        if is_my_turn and world.local_rank == 0:
            source = dataset.load(split)
        world.barrier()
    if world.local_world_size == 1:
        assert source is not None
        return source
    offer = _offer(source) if source is not None else None
    kind, rest, names, folder = world.gather(offer)[world.rank - world.local_rank]  # of this node's first process
    arrays = {name: np.load(f"{folder}/{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    world.barrier()
    if world.local_rank == 0 and folder is not None:
        shutil.rmtree(folder)  # the mappings live on without their names, and die with the last process
    return kind(**rest, **arrays)


def _offer(source: Source) -> tuple[type[Source], dict[str, Any], list[str], str | None]:
    """Take a source (a dataclass) apart: its class, its small fields, and its arrays, the last in files."""
    names = list(source.arrays)
    rest = {f.name: getattr(source, f.name) for f in dataclasses.fields(source) if f.name not in names}  # type: ignore[arg-type]  # a Protocol cannot say "dataclass"
    return type(source), rest, names, _write(source.arrays) if names else None


def _write(arrays: dict[str, np.ndarray]) -> str:
    size = sum(array.nbytes for array in arrays.values())
    fits = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 2 * size
    folder = tempfile.mkdtemp(prefix="steadfast_data_", dir=_SHARED_MEMORY if fits else None)
    for name, array in arrays.items():
        np.save(f"{folder}/{name}.npy", array, allow_pickle=False)
    return folder
