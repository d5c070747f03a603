"""The tensors of safetensors files by the model's names: the file and the name of each. This does not import torch."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from framework.checkpoint.format import FileTensor, read_header
from framework.config.init_from import InitFile, files_of, index_of
from framework.runtime.plain import Invalid
from framework.runtime.problem import shown

NUM_LISTED = 8  # how many names a message lists


def stored_tensors(entries: Sequence[InitFile]) -> dict[str, FileTensor]:
    """Return the tensors of the entries by the model's names. This reads only headers.

    Raise Invalid if a file is not plain safetensors, a pattern matches nothing, or two tensors would get the same name.
    """
    tensors: dict[str, FileTensor] = {}
    for entry in entries:
        try:
            own = tensors_of(entry)
            if twice := own.keys() & tensors.keys():
                raise Invalid(f"has {min(twice)}, which is in {tensors[min(twice)].path} too")
        except Invalid as error:
            raise Invalid(f"{shown(entry.file)} {error}") from None
        tensors |= own
    return tensors


def tensors_of(entry: InitFile) -> dict[str, FileTensor]:
    """Return the tensors of one entry. The message of Invalid does not name the entry."""
    held = _held(Path(entry.file))
    tensors: dict[str, FileTensor] = {}
    for old, name in entry.named(held).items():
        if name in tensors:
            raise Invalid(f"has {tensors[name].name} and {old}, which would both be {name}")
        tensors[name] = held[old]._replace(is_strict=entry.strict)
    for pattern in entry.transpose:
        if not (matching := fnmatch.filter(tensors, pattern)):
            raise Invalid(f"has no name that matches {pattern!r} of transpose; it has {listed(sorted(tensors))}")
        for name in matching:
            shape = tensors[name].shape
            if len(shape) != 2:
                raise Invalid(f"has {name} {shape}, which is not a matrix, but matches {pattern!r} of transpose")
            tensors[name] = tensors[name]._replace(shape=shape[::-1], is_transposed=True)
    return tensors


def _held(path: Path) -> dict[str, FileTensor]:
    first, *files = files_of(path)
    if not files:
        return read_header(first)
    headers = {}
    for file in files:
        try:
            headers[file.name] = read_header(file)
        except Invalid as error:
            raise Invalid(f"names {file.name}, which {error}") from None
    places = index_of(first)
    if absent := [name for name, file in places.items() if name not in headers[file]]:
        raise Invalid(f"says that {shown(absent[0])} is in {places[absent[0]]}, but {shown(absent[0])} is not there")
    return {name: headers[file][name] for name, file in places.items()}


def listed(names: list[str]) -> str:
    """Return the first names, and the number of the other names."""
    more = f" and {len(names) - NUM_LISTED} more" if len(names) > NUM_LISTED else ""
    return ", ".join(names[:NUM_LISTED]) + more
