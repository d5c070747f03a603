"""`steadfast convert FILE [OUT]`: convert the weights in a file of torch.save to safetensors.

This is the only place that reads a pickle. It reads only weights, in a separate process; the file's size limits the process's
memory and time.
"""

import json
import multiprocessing
import os
import re
import resource
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.runtime.exits import Exit
from framework.runtime.files import flush_directory, replacing
from framework.runtime.plain import Invalid, require_file
from framework.runtime.preemption import die_with_parent

if TYPE_CHECKING:
    from torch import Tensor

_USAGE = "needs a file of torch.save, and a file to write (steadfast convert FILE [OUT.safetensors])"
_MEMORY = 1 << 30, 4  # bytes in addition to the process's memory, and per byte of the file: it is mapped, copied and written
_TIME_S = 60.0, 1 / (10 << 20)  # seconds, and seconds per byte of the file


def convert(arguments: list[str]) -> int:
    """Write the weights of a file of torch.save, and print what is left out. Return the exit code."""
    if not 1 <= len(arguments) <= 2 or any(argument.startswith("-") for argument in arguments):
        return _refuse(_USAGE)
    path = Path(arguments[0])
    try:
        size = require_file(path.resolve())
    except Invalid as error:
        return _refuse(f"{path}: {error}")
    except OSError as error:
        return _refuse(f"{path}: cannot be read ({error.strerror})")
    out = Path(arguments[1]) if len(arguments) > 1 else path.with_suffix(".safetensors")
    if out.suffix != ".safetensors" or out.exists():
        return _refuse(f"{out} {'exists already' if out.exists() else 'does not end with .safetensors'} (another OUT)")
    answer = _in_child(path, out, size=size)
    if answer["lines"]:
        print("\n".join(answer["lines"]))
        return Exit.FINISHED
    print(f"convert: {path}: {answer['fault']}", file=sys.stderr)
    return int(answer["code"])


def _refuse(what: str) -> int:
    print(f"convert: {what}", file=sys.stderr)
    return Exit.CONFIGURATION


def _in_child(path: Path, out: Path, *, size: int) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(path, out, theirs), kwargs={"size": size})
    child.start()
    theirs.close()
    limit_s = _TIME_S[0] + _TIME_S[1] * size
    fault = f"its process took more than {limit_s:.0f} s"
    with suppress(EOFError):
        if ours.poll(limit_s):
            fault = "its process ended without an answer"
            answer: dict[str, Any] = json.loads(ours.recv_bytes())
            child.join()
            return answer
    child.kill()
    child.join()
    out.with_name(f".{out.name}.{child.pid}").unlink(missing_ok=True)  # the file that `replacing` has started
    return {"lines": [], "fault": fault, "code": Exit.FAILED}


def _child(path: Path, out: Path, answer: Connection, *, size: int) -> None:
    die_with_parent()
    lines, fault, code = list[str](), "", Exit.CONFIGURATION
    try:
        lines = _converted(path, out, size=size)
    except Invalid as error:
        fault = str(error)
    except OSError as error:
        fault, code = f"{out} cannot be written ({error.strerror or error})", Exit.DISK
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        fault = f"{type(error).__name__}: {text}"
        if _is_short_of_memory(error):
            fault = f"takes more memory than a file of {size:,} bytes of weights should"
    answer.send_bytes(json.dumps({"lines": lines, "fault": fault, "code": code}).encode())
    answer.close()
    os._exit(0)


# --- in the separate process


def _converted(path: Path, out: Path, *, size: int) -> list[str]:
    """Write the weights, and return the lines to print. Raise Invalid, or the errors of torch."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    _limit_memory(_MEMORY[0] + _MEMORY[1] * size)
    data = _loaded(path)
    found = _mappings(data)
    if not found:
        raise Invalid("has no named tensors")
    place = max(found, key=lambda place: len(_tensors(found[place])))  # of several equal ones, the first
    tensors = _tensors(found[place])
    weights, remarks = _renamed({name: _plain(name, value) for name, value in tensors.items()})
    rest = {key: value for key, value in found[place].items() if key not in tensors}
    if place:
        rest |= {key: value for key, value in data.items() if key != place[0]}
    with replacing(out) as beside:
        try:
            save_file(_apart(weights), beside, metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors raises this error if the disk is full
            raise OSError(str(error)) from error
    flush_directory(out.parent)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    of = f": {' > '.join(place)} of the file" if place else ""
    lines = [f"{out}: {len(weights)} tensors, {num_bytes:,} bytes{of}", *remarks]
    return lines + ([f"left out: {', '.join(f'{key} ({_kind(value)})' for key, value in rest.items())}"] if rest else [])


def _limit_memory(more: int) -> None:
    """Allow this process to use `more` bytes in addition to its present memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + more if most == resource.RLIM_INFINITY else min(used + more, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def _loaded(path: Path) -> Any:
    import torch

    is_archive = zipfile.is_zipfile(path)
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > 2 * path.stat().st_size + (1 << 20):  # torch.save compresses nothing, torch.jit.save only its sources
            raise Invalid(f"is an archive that would unpack to {unpacked:,} bytes, which torch.save does not write")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # a damaged file can raise any error
        if _is_short_of_memory(error):
            raise
        text = " ".join(str(error).split())
        if "TorchScript" in text:
            raise Invalid("is a TorchScript program (torch.jit.load() it, and torch.save() its state_dict())") from None
        if needed := re.search(r"GLOBAL ([\w.]+)", text):
            what = f"needs more than weights: loading it would call {needed[1]}, and nothing was called"
            raise Invalid(f"{what} (if you trust the file: torch.load() it, and torch.save() its state_dict())") from None
        raise Invalid(f"is not a file of torch.save, or is damaged ({type(error).__name__}: {text[:200]})") from None


def _is_short_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def _mappings(data: Any) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """Return every mapping from names to tensors (and other values) in the loaded data, by the keys that lead to it."""
    found: dict[tuple[str, ...], Mapping[str, Any]] = {}
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], Any]] = [((), data)]
    for place, value in waiting:  # the list grows during the loop
        if isinstance(value, Mapping) and id(value) not in seen:
            seen.add(id(value))
            if _tensors(value) and all(isinstance(key, str) for key in value):
                found[place] = value
            waiting += [((*place, str(key)), inner) for key, inner in value.items()]
    return found


def _tensors(mapping: Mapping[str, Any]) -> "dict[str, Tensor]":
    import torch

    return {name: value for name, value in mapping.items() if isinstance(value, torch.Tensor)}


def _plain(name: str, value: "Tensor") -> "Tensor":
    import torch

    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        kind = "quantized" if value.is_quantized else "without storage" if value.is_meta else value.layout
        raise Invalid(f"has {name}, which is {kind}: safetensors cannot hold it")
    return value.detach().contiguous()


def _renamed(weights: "dict[str, Tensor]") -> "tuple[dict[str, Tensor], list[str]]":
    """Return the weights without the prefixes of torch's wrappers in their names, and a line for each wrapper.

    DistributedDataParallel wraps the whole model. torch.compile may wrap only some of its blocks.
    """
    remarks = []
    while True:
        if any("_orig_mod" in name.split(".") for name in weights):
            weights = {re.sub(r"(^|\.)_orig_mod\.", r"\1", name): value for name, value in weights.items()}
            remarks.append("'_orig_mod.', which torch.compile adds, is removed from the names")
        elif all(name.startswith("module.") for name in weights):
            weights = {name.removeprefix("module."): value for name, value in weights.items()}
            remarks.append("'module.', which DistributedDataParallel adds, is removed from the names")
        else:
            return weights, remarks


def _apart(weights: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """Return a separate tensor for every name, also for tied weights: so a model needs only its own names."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in weights.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return apart


def _kind(value: Any) -> str:
    """Return a description of a value that was left out."""
    if isinstance(value, Mapping) and (tensors := _tensors(value)):
        return f"{len(tensors)} tensors"
    return type(value).__name__
