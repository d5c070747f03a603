"""torch's compiler. All runs below one root share its caches.

This file has names of torch that are not public, like `torch_internals`.
"""

import gc
import hashlib
import importlib
import os
import platform
import sys
import tempfile
from pathlib import Path

from framework.runtime.environment import variables


def import_dynamo() -> None:
    """Import torch with `torch._dynamo`. Every optimizer imports it: a process that forks workers does it for them.

    The imported objects stay. To look for garbage among them takes a quarter of the time, so they become old unseen.
    """
    if "torch._dynamo" in sys.modules:  # what this process has frozen stays frozen
        return
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch._dynamo")
    finally:
        gc.freeze()
        gc.unfreeze()  # from no generation to the oldest
        if is_collecting:
            gc.enable()


def has_compiler() -> bool:
    """Return whether torch.compile finds the C++ compiler (`CXX`, else g++). Without a compiler it fails at the first step."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


def compile_into(folder: Path, *, num_versions: int) -> None:
    """Make torch.compile keep its results only below this folder, and compile up to `num_versions` versions of a function.

    The caches are pickles. By default they are in a folder in /tmp with a name that anybody can guess. A folder that other
    users can write is not used. Each user and kind of CPU has its own: compiled code uses any instruction of its CPU. Above its
    limit of versions (8), torch silently stops compiling; a network with more shapes would reach this limit.
    """
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    instructions = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    folder /= f".compiled-{os.getuid()}-{hashlib.sha256(instructions.encode()).hexdigest()[:8]}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:  # another user could put a pickle there
        folder = Path(tempfile.mkdtemp(prefix="compiled_"))
    variables()["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute())
    torch._inductor.config.fx_graph_cache = True
    torch._functorch.config.enable_autograd_cache = True
    torch._dynamo.config.automatic_dynamic_local_pgo = False
    torch._dynamo.config.recompile_limit = num_versions
    torch._dynamo.config.accumulated_recompile_limit = max(256, num_versions)
