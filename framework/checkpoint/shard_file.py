"""A rank's file in a checkpoint: plain safetensors. Its metadata contains the place of each tensor in the larger tensor.

The layout is that of torch.distributed.checkpoint's HuggingFaceStorageWriter, which wrote these files until format 2. Its
reader can read both formats. Its writer copies all tensors twice and holds the interpreter's lock; the writer here makes no
copy.
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
    """Return the safetensors name of a type. Return None if safetensors does not have the type, as for complex128."""
    return _NAMES.get(str(dtype).removeprefix("torch."))


# --- writing


def write_shard(path: Path, chunks: Mapping[Chunk, Tensor]) -> dict[str, Any]:
    """Write a new file of chunks, and flush it. Return its size and checksum, in a manifest's form.

    The blocks come from the tensors' memory. A tensor that is not on the CPU, or not contiguous, is copied: one at a time.
    """
    # the largest element sizes first, so that each tensor is aligned for its type
    order = sorted(chunks, key=lambda chunk: (-chunks[chunk].element_size(), chunk))
    places = {chunk.name: {"saved_offsets": chunk.offsets} for chunk in order}
    kinds = {chunk.name: (chunks[chunk].dtype, chunk.sizes) for chunk in order}
    metadata = {"format": "pt", PLACES: json.dumps(places)}
    return write_safetensors(path, kinds, (chunks[chunk] for chunk in order), metadata=metadata)


Kinds = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # type and shape of tensors


def write_safetensors(path: Path, kinds: Kinds, tensors: Iterable[Tensor], *, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write a new file of tensors, which may come one by one in the order of `kinds`, and flush it.

    Return its size and checksum, in a manifest's form. Tensors with larger element sizes must come first.
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
    """A tensor of a checkpoint, and the places of its parts."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: list[StoredChunk]


Inventory = Mapping[str, StoredTensor]


def inventory_of(stored: Mapping[str, list[StoredChunk]]) -> Inventory:
    """Return the tensors that consist of these parts."""

    def joined(parts: list[StoredChunk]) -> StoredTensor:
        shape = torch.Size(map(max, zip(*(part.ends for part in parts))))
        return StoredTensor(getattr(torch, DTYPES[parts[0].dtype]), shape, parts)

    return {name: joined(parts) for name, parts in stored.items()}


@torch.no_grad()
def read_tensors(directory: Path, inventory: Inventory, targets: Mapping[str, Tensor]) -> None:
    """Overwrite this rank's parts of the targets (plain or DTensor). Cast if the types differ.

    Read only the regions of the files that these parts need.
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
