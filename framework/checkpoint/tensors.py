"""The headers of safetensors files that a stranger may have written. They are checked before anything else is read.

safetensors itself refuses a header that is too long, and tensors that overlap, leave gaps, or have another size than their
bytes. This does not import torch.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from framework.checkpoint.state import Natural
from framework.runtime.plain import Invalid, Plain, first_fault, parse_json, require_file
from framework.runtime.problem import shown

DTYPES = {  # torch's types by safetensors' names
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
_KINDS = ("model/", "optimizer/", "average/", "task/", "part/")


class Entry(NamedTuple):
    """A tensor in a file's header."""

    dtype: str  # in safetensors' names: F32, BF16, I64, ...
    shape: list[int]


def read_header(path: Path) -> dict[str, Entry]:
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
    """Return whether a plain file has the format of torch.save: an archive, or (before torch 1.6) a pickle."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4).startswith((b"PK\3\4", b"\x80"))


def _read(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: Entry(part.get_dtype(), part.get_shape()) for name, part in slices.items()}, file.metadata() or {}
    except SafetensorError as error:
        raise Invalid(f"is not a safetensors file: {shown(str(error))}") from None


class _Place(Plain):
    """A shard's place in its tensor, in the format of DCP's writer."""

    saved_offsets: list[Natural] = Field(max_length=64)


PLACES = "DCP_SHARDING_INFO"  # the key in a file's metadata
_PLACES = TypeAdapter(dict[str, _Place])


@dataclass(frozen=True)
class StoredChunk:
    """A part of a tensor, in a file."""

    file: str
    dtype: str
    offsets: Sequence[int]
    sizes: Sequence[int]

    @property
    def ends(self) -> list[int]:
        return [offset + size for offset, size in zip(self.offsets, self.sizes)]


def check_tensors(directory: Path, files: Sequence[str]) -> None:
    """Check that every file is safetensors, and that each tensor's chunks cover the whole tensor exactly once.

    This reads only headers. The files' sizes limit the memory that loading can use. Raise Invalid if a check fails.
    """
    for name, parts in stored_chunks(directory, files).items():
        if fault := _fault(name, parts):
            raise Invalid(f"{parts[0].file}: {shown(name)} {fault}")


def stored_chunks(directory: Path, files: Sequence[str]) -> dict[str, list[StoredChunk]]:
    """Return the parts of each tensor. Raise Invalid if a file is not safetensors, or does not contain the parts' places."""
    chunks: dict[str, list[StoredChunk]] = defaultdict(list)
    for file in files:
        for name, chunk in _chunks_of(directory / file).items():
            chunks[name].append(chunk)
    return chunks


def _chunks_of(path: Path) -> dict[str, StoredChunk]:
    try:
        entries, metadata = _read(path)
        places = _PLACES.validate_python(parse_json(metadata[PLACES]))
        return {name: StoredChunk(path.name, entry.dtype, places[name].saved_offsets, entry.shape)
                for name, entry in entries.items()}  # fmt: skip
    except Invalid as error:
        raise Invalid(f"{path.name} {error}") from None
    except ValidationError as error:
        raise Invalid(f"{path.name} misplaces its tensors: {first_fault(error)}") from None
    except (KeyError, ValueError, RecursionError):
        raise Invalid(f"{path.name} does not say where its tensors belong") from None


def _fault(name: str, parts: Sequence[StoredChunk]) -> str | None:
    first = parts[0]
    if not name.startswith(_KINDS) or not name.isprintable():
        return "does not belong to the model, the optimizer, the average, the task or a part"
    if first.dtype not in DTYPES or any(part.dtype != first.dtype for part in parts):
        return "has a type that torch does not have, or several"
    if any(not len(part.offsets) == len(part.sizes) == len(first.sizes) for part in parts):
        return "has chunks of different dimensions"
    whole = [max(ends) for ends in zip(*(part.ends for part in parts))]
    filled = sorted((part for part in parts if math.prod(part.sizes)), key=lambda part: list(part.offsets))
    if sum(math.prod(part.sizes) for part in filled) != math.prod(whole) or _overlap(filled):
        return "has chunks that do not make up one tensor"
    return None


def _overlap(parts: Sequence[StoredChunk]) -> bool:
    for number, part in enumerate(parts):
        for other in parts[number + 1 :]:
            if part.sizes and other.offsets[0] >= part.ends[0]:
                break  # all later parts begin even later
            if all(a < d and c < b for a, b, c, d in zip(part.offsets, part.ends, other.offsets, other.ends)):
                return True
    return False
