"""Backends of other packages. Each backend registers itself with torch.distributed when its package is imported."""

import importlib
from collections.abc import Callable

import torch.distributed as dist


def kinds_of_devices(name: str, *, module: str) -> list[str]:
    """Import `module`, and return the kinds of devices (cpu, cuda) that its backend `name` supports.

    Raise ValueError with the reason if the module or the backend does not exist.
    """
    try:
        importlib.import_module(module)
    except Exception as error:  # the import of a package may raise any exception
        raise ValueError(f"{module} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}") from error
    known = dist.Backend.backend_capability
    if name not in dist.Backend.backend_list or name not in known:
        what = "torch.distributed.Backend.register_backend, with devices"
        raise ValueError(f"{module} registers no back end {name} ({what}; known are {', '.join(sorted(known))})")
    return list(known[name])


def refusals(name: str, *, module: str, device: str, num_processes: int, only_sums: bool) -> list[str]:
    """Return why a module's backend refuses a run, as lines `KEY: WHAT`: the device, and the answer of the module's `problems`.

    `only_sums`: the processes only sum and broadcast.
    """
    try:
        kinds = kinds_of_devices(name, module=module)
    except ValueError as error:
        return [f"backend.name: {error} (install it, or put it on PYTHONPATH; or backend=auto)"]
    if device not in ("auto", *kinds):
        return [f"device: {device}, but the back end {name} is for {', '.join(kinds)} ({kinds[0]}, or backend=auto)"]
    asked: Callable[..., list[str]] | None = getattr(importlib.import_module(module), "problems", None)
    return asked(num_processes=num_processes, only_sums=only_sums) if asked is not None else []
