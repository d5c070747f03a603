"""A rank's file in a checkpoint: plain safetensors, in whose metadata it says where each tensor is a part of a larger one.

The layout is that of torch.distributed.checkpoint's HuggingFaceStorageWriter, which wrote them until format 2, and whose
reader reads both. Its writer makes two copies of all tensors with the interpreter held; this one makes none.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from framework.checkpoint.chunks import Chunk
from framework.checkpoint.hashed import write_hashed
from framework.checkpoint.tensors import DTYPES, PLACES, StoredChunk
from framework.modules.tensors import local

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return how safetensors names a type; None if it has it not: complex128, for example."""
    return _NAMES.get(str(dtype).removeprefix("torch."))


# --- writing


def write_shard(path: Path, chunks: Mapping[Chunk, Tensor]) -> dict[str, Any]:
    """Write a new file of chunks, and flush it. Returns its size and checksum, as a manifest has them.

    From the tensors' memory, in blocks: of what is not on the CPU, or not contiguous, one tensor at a time is copied.
    """
    # the largest numbers first, so that each begins where its type may
    order = sorted(chunks, key=lambda chunk: (-chunks[chunk].element_size(), chunk))
    places = {chunk.name: {"saved_offsets": chunk.offsets} for chunk in order}
    kinds = {chunk.name: (chunks[chunk].dtype, chunk.sizes) for chunk in order}
    metadata = {"format": "pt", PLACES: json.dumps(places)}
    return write_safetensors(path, kinds, (chunks[chunk] for chunk in order), metadata=metadata)


Kinds = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # of tensors: type and shape


def write_safetensors(path: Path, kinds: Kinds, tensors: Iterable[Tensor], *, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write a new file of tensors, which may come one by one, in the order of their kinds, and flush it.

    Returns its size and checksum, as a manifest has them. Larger numbers have to come before smaller ones.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in kinds.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return write_hashed(path, [struct.pack("<Q", len(text)) + text], map(_memory, tensors))


def _memory(tensor: Tensor) -> memoryview:
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


# --- reading


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, and where its parts are."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: list[StoredChunk]


Inventory = Mapping[str, StoredTensor]


def inventory_of(stored: Mapping[str, list[StoredChunk]]) -> Inventory:
    """Return the tensors whose parts are these."""

    def joined(parts: list[StoredChunk]) -> StoredTensor:
        shape = torch.Size(map(max, zip(*(part.ends for part in parts))))
        return StoredTensor(getattr(torch, DTYPES[parts[0].dtype]), shape, parts)

    return {name: joined(parts) for name, parts in stored.items()}


@torch.no_grad()
def read_tensors(directory: Path, inventory: Inventory, targets: Mapping[str, Tensor]) -> None:
    """Overwrite this rank's parts of the targets (plain or DTensor), casting where a type differs.

    Of the files, only what these parts need is read.
    """
    reads: dict[str, list[tuple[str, tuple[slice, ...], Tensor]]] = {}
    for name, target in targets.items():
        place, part = Chunk.of(name, target), local(target)
        for chunk in inventory[name].chunks if part.numel() else []:
            begins = [max(begin) for begin in zip(place.offsets, chunk.offsets)]
            sizes = [min(end) - begin for begin, *end in zip(begins, _ends(place), chunk.ends)]
            if all(size > 0 for size in sizes):
                there = tuple(slice(b - o, b - o + s) for b, o, s in zip(begins, chunk.offsets, sizes))
                here = tuple(slice(b - o, b - o + s) for b, o, s in zip(begins, place.offsets, sizes))
                reads.setdefault(chunk.file, []).append((name, there, part[here]))
    for file, wanted in reads.items():
        with safe_open(directory / file, framework="pt") as opened:
            for name, there, part in wanted:
                part.copy_(opened.get_slice(name)[there])


def _ends(chunk: Chunk) -> list[int]:
    return [offset + size for offset, size in zip(chunk.offsets, chunk.sizes)]
