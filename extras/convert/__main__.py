"""`steadfast convert FILE [OUT]`: the weights in a file of torch.save, as safetensors. torch reads weights only."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_USAGE = "needs a file of torch.save, and a file to write (steadfast convert FILE [OUT.safetensors])"
_TRUST = "if you trust the file: torch.load() it, and torch.save() its state_dict()"


class Invalid(Exception):
    """A file without weights that can be read. The message says why."""


def main(arguments: list[str]) -> int:
    """Write the weights of a file of torch.save, and print what is left out. Return the exit code."""
    if not 1 <= len(arguments) <= 2 or any(argument.startswith("-") for argument in arguments):
        return _refused(_USAGE)
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(arguments[0])
    out = Path(arguments[1]) if len(arguments) > 1 else path.with_suffix(".safetensors")
    if out.suffix != ".safetensors" or out.exists():
        return _refused(f"{out} {'exists already' if out.exists() else 'does not end with .safetensors'} (another OUT)")
    try:
        if not path.resolve(strict=True).is_file():
            raise Invalid(f"is {'a directory' if path.is_dir() else 'a device or a pipe'} instead of a file")
        weights, where, lines = _weights(_loaded(path))
    except (Invalid, OSError) as error:
        return _refused(f"{path}: {f'cannot be read ({error.strerror})' if isinstance(error, OSError) else error}")
    beside = out.with_name(f".{out.name}.{os.getpid()}")  # the whole file appears at once, or none
    try:
        beside.touch()
        mode = beside.stat().st_mode  # of any new file; that of safetensors is for this user alone
        save_file(weights, beside, metadata={"format": "pt"})
        beside.chmod(mode)
        os.replace(beside, out)
    except (OSError, SafetensorError) as error:  # safetensors raises its own error if the disk is full
        beside.unlink(missing_ok=True)
        return _refused(f"{out} cannot be written ({error})", code=_DISK)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    print(f"{out}: {len(weights)} tensors, {num_bytes:,} bytes{where}", *lines, sep="\n")
    return 0


_CONFIGURATION, _DISK = 78, 74  # exit codes


def _refused(what: str, *, code: int = _CONFIGURATION) -> int:
    print(f"convert: {what}", file=sys.stderr)
    return code


def _loaded(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise any error
        text = " ".join(str(error).split())
        if "TorchScript" in text:
            raise Invalid("is a TorchScript program (torch.jit.load() it, and torch.save() its state_dict())") from None
        if needed := re.search(r"GLOBAL ([\w.]+)", text):
            raise Invalid(f"needs more than weights: it would call {needed[1]}, and nothing was called ({_TRUST})") from None
        raise Invalid(f"is not a file of torch.save, or is damaged ({type(error).__name__}: {text[:200]})") from None


def _weights(data: Any) -> "tuple[dict[str, Tensor], str, list[str]]":
    """Return the largest mapping from names to tensors in the loaded data, where it was found, and the lines to print."""
    found: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []
    waiting: list[tuple[tuple[str, ...], Any]] = [((), data)]
    for place, value in waiting:  # the list grows during the loop
        if isinstance(value, Mapping) and all(value is not other for _, other in found):
            if all(isinstance(key, str) for key in value):
                found.append((place, value))
            waiting += [((*place, str(key)), inner) for key, inner in value.items() if len(place) < 8]
    place, mapping = max(found, key=lambda item: len(_tensors(item[1])), default=((), {}))  # of several equal ones, the first
    tensors = _tensors(mapping)
    if not tensors:
        raise Invalid("has no named tensors")
    weights, lines = _renamed({name: _plain(name, value) for name, value in tensors.items()})
    rest = {key: value for key, value in mapping.items() if key not in tensors}
    rest |= {key: value for key, value in data.items() if key != place[0]} if place else {}
    left_out = ", ".join(f"{key} ({_kind(value)})" for key, value in rest.items())
    where = f": {' > '.join(place)} of the file" if place else ""
    return weights, where, [*lines, *([f"left out: {left_out}"] if rest else [])]


def _tensors(mapping: Mapping[str, Any]) -> "dict[str, Tensor]":
    import torch

    return {name: value for name, value in mapping.items() if isinstance(value, torch.Tensor)}


def _plain(name: str, value: "Tensor") -> "Tensor":
    """Return a tensor of its own, also for tied weights: so a model needs only its own names."""
    import torch

    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise Invalid(f"has {name}, which is {value.layout}, quantized or without storage: safetensors cannot hold it")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise Invalid(f"has {name}, which has more values than the file")
    return value.detach().clone(memory_format=torch.contiguous_format)


def _renamed(weights: "dict[str, Tensor]") -> "tuple[dict[str, Tensor], list[str]]":
    """Return the weights without the prefixes of torch's wrappers in their names, and a line for each wrapper.

    DistributedDataParallel wraps the whole model. torch.compile may wrap only some of its blocks.
    """
    lines = []
    if any("_orig_mod" in name.split(".") for name in weights):
        weights = {re.sub(r"(^|\.)_orig_mod(?=\.)", "", name).removeprefix("."): value for name, value in weights.items()}
        lines.append("'_orig_mod.', which torch.compile adds, is removed from the names")
    while all(name.startswith("module.") for name in weights):
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
        lines.append("'module.', which DistributedDataParallel adds, is removed from the names")
    return weights, lines


def _kind(value: Any) -> str:
    return f"{len(tensors)} tensors" if isinstance(value, Mapping) and (tensors := _tensors(value)) else type(value).__name__
