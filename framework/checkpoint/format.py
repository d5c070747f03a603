"""The one file format of tensors: plain safetensors, written and read by regions. Headers are checked as a stranger's.

The metadata of a checkpoint's file contains the place of each tensor in the larger tensor, in the layout of
torch.distributed.checkpoint's HuggingFaceStorageWriter, so that its reader can read the files too. Its writer copies all
tensors twice and holds the interpreter's lock; the writer here makes no copy. safetensors itself refuses a header that is too
long, and tensors that overlap, leave gaps, or have another size than their bytes.

torch is imported late: the preflight reads headers without it.
"""

import json
import math
import os
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from xxhash import xxh3_128

from framework.checkpoint.state import Natural
from framework.runtime.files import checksum
from framework.runtime.plain import Invalid, Plain, first_fault, parse_json, require_file
from framework.runtime.problem import shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = {  # torch's types by safetensors' names
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
_NAMES = {torchs: name for name, torchs in DTYPES.items()}
_KINDS = ("model/", "optimizer/", "average/", "task/", "part/")
_PLACES = "DCP_SHARDING_INFO"  # the key in a file's metadata
_BLOCK = 8 << 20  # bytes: hashing and writing a block takes milliseconds, in which other threads may run Python


def dtype_name(dtype: "torch.dtype") -> str | None:
    """Return the safetensors name of a type. Return None if safetensors does not have the type, as for complex128."""
    return _NAMES.get(str(dtype).removeprefix("torch."))


# --- headers


class FileTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    name: str  # the name in the file
    dtype: str  # in safetensors' names: F32, BF16, I64, ...
    shape: Sequence[int]  # that the model gets
    is_transposed: bool = False
    is_strict: bool = False  # the tensor must fit the model


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return a file's tensors by name. Raise Invalid unless it is a plain safetensors file of the current user or of root.

    A link is followed, because the user has named the file.
    """
    try:
        require_file(path.resolve())
        header, _ = _read(path)
    except OSError as error:
        raise Invalid(f"cannot be read ({error.strerror})") from None
    except Invalid:
        if _is_pickled(path):
            what = "it is a pickle, and reading a pickle can run code"
            raise Invalid(f"is not a safetensors file: {what}; `steadfast convert {path}` converts it") from None
        raise
    if odd := [name for name in header if not name.isprintable()]:
        raise Invalid(f"has a name that cannot be printed: {shown(odd[0])}")
    return header


def _is_pickled(path: Path) -> bool:
    """Return whether a file has the format of torch.save: an archive, or (before torch 1.6) a pickle."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4).startswith((b"PK\3\4", b"\x80"))


def _read(path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            kinds = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
            return {name: FileTensor(path, name, *kind) for name, kind in kinds.items()}, file.metadata() or {}
    except SafetensorError as error:
        raise Invalid(f"is not a safetensors file: {shown(str(error))}") from None


class _Place(Plain):
    """A shard's place in its tensor, in the format of DCP's writer."""

    saved_offsets: list[Natural] = Field(max_length=64)


_PLACES_OF = TypeAdapter(dict[str, _Place])


class Chunk(NamedTuple):
    """A box in a tensor: the whole tensor, or the part of it that a rank or a file has."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str = ""  # these are known for a part in a file
    file: str = ""

    @property
    def ends(self) -> list[int]:
        return [offset + size for offset, size in zip(self.offsets, self.sizes)]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its parts, and what they make together."""

    chunks: list[Chunk]

    @property
    def dtype(self) -> "torch.dtype":
        import torch

        return getattr(torch, DTYPES[self.chunks[0].dtype])  # type: ignore[no-any-return]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(max, zip(*(chunk.ends for chunk in self.chunks))))


Inventory = Mapping[str, StoredTensor]


def inventory_of(directory: Path, files: Sequence[str]) -> Inventory:
    """Return the tensors in files. Raise Invalid if a file is not safetensors, or does not contain the parts' places."""
    found: dict[str, list[Chunk]] = defaultdict(list)
    for file in files:
        for name, chunk in _chunks_of(directory / file).items():
            found[name].append(chunk)
    return {name: StoredTensor(chunks) for name, chunks in found.items()}


def _chunks_of(path: Path) -> dict[str, Chunk]:
    try:
        entries, metadata = _read(path)
        places = _PLACES_OF.validate_python(parse_json(metadata[_PLACES]))
        return {name: Chunk(name, tuple(places[name].saved_offsets), tuple(entry.shape), entry.dtype, path.name)
                for name, entry in entries.items()}  # fmt: skip
    except Invalid as error:
        raise Invalid(f"{path.name} {error}") from None
    except ValidationError as error:
        raise Invalid(f"{path.name} misplaces its tensors: {first_fault(error)}") from None
    except (KeyError, ValueError, RecursionError):
        raise Invalid(f"{path.name} does not say where its tensors belong") from None


def check_inventory(inventory: Inventory) -> None:
    """Check that each tensor's chunks cover the whole tensor exactly once. Raise Invalid if a check fails.

    The files' sizes then limit the memory that loading can use.
    """
    for name, tensor in inventory.items():
        if fault := chunks_fault(tensor.chunks):
            raise Invalid(f"{tensor.chunks[0].file}: {shown(name)} {fault}")


def chunks_fault(chunks: Sequence[Chunk]) -> str | None:
    """Return why chunks do not make up one tensor of a run, or None."""
    first = chunks[0]
    if not first.name.startswith(_KINDS) or not first.name.isprintable():
        return "does not belong to the model, the optimizer, the average, the task or a part"
    if first.dtype not in DTYPES or any(chunk.dtype != first.dtype for chunk in chunks):
        return "has a type that torch does not have, or several"
    if any(not len(chunk.offsets) == len(chunk.sizes) == len(first.sizes) for chunk in chunks):
        return "has chunks of different dimensions"
    whole = [max(ends) for ends in zip(*(chunk.ends for chunk in chunks))]
    filled = sorted((chunk for chunk in chunks if math.prod(chunk.sizes)), key=lambda chunk: chunk.offsets)
    if sum(math.prod(chunk.sizes) for chunk in filled) != math.prod(whole) or _overlap(filled):
        return "has chunks that do not make up one tensor"
    return None


def _overlap(chunks: Sequence[Chunk]) -> bool:
    for number, chunk in enumerate(chunks):
        for other in chunks[number + 1 :]:
            if chunk.sizes and other.offsets[0] >= chunk.ends[0]:
                break  # all later chunks begin even later
            if all(a < d and c < b for a, b, c, d in zip(chunk.offsets, chunk.ends, other.offsets, other.ends)):
                return True
    return False


# --- writing


def write_shard(path: Path, chunks: "Mapping[Chunk, Tensor]") -> dict[str, Any]:
    """Write a new file of chunks, and flush it. Return its size and checksum, in a manifest's form."""
    # the largest element sizes first, so that each tensor is aligned for its type
    order = sorted(chunks, key=lambda chunk: (-chunks[chunk].element_size(), chunk))
    places = {chunk.name: {"saved_offsets": chunk.offsets} for chunk in order}
    kinds = {chunk.name: (chunks[chunk].dtype, chunk.sizes) for chunk in order}
    metadata = {"format": "pt", _PLACES: json.dumps(places)}
    return write_safetensors(path, kinds, (chunks[chunk] for chunk in order), metadata=metadata)


Kinds = Mapping[str, tuple["torch.dtype", Sequence[int]]]  # type and shape of tensors


def write_safetensors(path: Path, kinds: Kinds, tensors: "Iterable[Tensor]", *, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write a new file of tensors, which may come one by one in the order of `kinds`, and flush it.

    Return its size and checksum (xxh3, 128 bits: it detects damage, but not an attacker), in a manifest's form. Tensors with
    larger element sizes must come first. The blocks come from the tensors' memory. A tensor that is not on the CPU, or not
    contiguous, is copied: one at a time.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in kinds.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    hashed, size = xxh3_128(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for block in _blocks(struct.pack("<Q", len(text)) + text, tensors):
            hashed.update(block)
            size += len(block)
            while block:
                block = block[os.write(descriptor, block) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"size": size, "xxh3_128": hashed.hexdigest()}


def _blocks(header: bytes, tensors: "Iterable[Tensor]") -> Iterator[memoryview]:
    import torch

    yield memoryview(header)
    for tensor in tensors:
        memory = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from (memory[first : first + _BLOCK] for first in range(0, len(memory), _BLOCK))


# --- reading


def digest(path: Path) -> dict[str, Any]:
    """Return a file's size and checksum, in a manifest's form."""
    size, digits = checksum(path, xxh3_128)
    return {"size": size, "xxh3_128": digits}


def read_regions(directory: Path, inventory: Inventory, targets: "Mapping[Chunk, Tensor]") -> None:
    """Overwrite parts of tensors, each at its place in the whole tensor. Cast if the types differ.

    Read only the regions of the files that these parts need.
    """
    reads: dict[str, list[tuple[str, tuple[slice, ...], Tensor]]] = {}
    for place, part in targets.items():
        for chunk in inventory[place.name].chunks:
            begins = [max(begin) for begin in zip(place.offsets, chunk.offsets)]
            sizes = [min(end) - begin for begin, *end in zip(begins, place.ends, chunk.ends)]
            if all(size > 0 for size in sizes):
                there = tuple(slice(b - o, b - o + s) for b, o, s in zip(begins, chunk.offsets, sizes))
                here = tuple(slice(b - o, b - o + s) for b, o, s in zip(begins, place.offsets, sizes))
                reads.setdefault(chunk.file, []).append((place.name, there, part[here]))
    for file, wanted in reads.items():
        with safe_open(directory / file, framework="pt") as opened:
            for name, there, part in wanted:
                part.detach().copy_(opened.get_slice(name)[there])
