"""Back ends of other packages: each registers itself with torch.distributed when its package is imported."""

import importlib

import torch.distributed as dist


def kinds_of_devices(name: str, *, module: str) -> list[str]:
    """Import `module`, and return for which kinds of devices (cpu, cuda) the back end is that it registers as `name`.

    ValueError, which says why, if there is none.
    """
    try:
        importlib.import_module(module)
    except Exception as error:  # a package may raise anything while it is imported
        raise ValueError(f"{module} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}") from error
    known = dist.Backend.backend_capability
    if name not in dist.Backend.backend_list or name not in known:
        what = "torch.distributed.Backend.register_backend, with devices"
        raise ValueError(f"{module} registers no back end {name} ({what}; known are {', '.join(sorted(known))})")
    return list(known[name])
