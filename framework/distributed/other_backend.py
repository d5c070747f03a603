"""Backends of other packages. Each backend registers itself with torch.distributed when its package is imported."""

import importlib

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
