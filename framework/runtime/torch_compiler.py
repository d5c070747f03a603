"""torch's compiler. Its import is late, because it takes as long as the import of torch. Its caches belong to the run.

This file has names of torch that are not public, like `torch_internals`.
"""

import functools
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from framework.runtime.environment import variables


class _LaterPart:
    """A part of `torch._dynamo` before its import, with the functions of it that torch uses."""

    def __init__(self, part: str, **used: Callable[[], Any]) -> None:
        self.part = part
        vars(self).update(used)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(import_dynamo(), self.part), name)


class _Later(ModuleType):
    """The substitute for `torch._dynamo` until its first use.

    Every optimizer imports this module, which takes as long as importing torch. Optimizers, DDP and process groups use some of
    its functions, which matter only to compiled code: these functions are here. Any other name imports the real module.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.utils = _LaterPart("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # the default; nobody has changed it
        self.trace_rules = _LaterPart("trace_rules", clear_lru_cache=lambda: None)
        self.when_imported: list[Callable[[ModuleType], None]] = []

    def graph_break(self) -> None:
        """Do nothing, because nothing is being compiled."""

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return a function that does the same, and that a later compilation leaves out."""
        if not isinstance(function, FunctionType):
            return import_dynamo().disable(function, recursive, **options)
        current = [function]

        def begin(dynamo: ModuleType) -> None:
            current[0] = dynamo.disable(function, recursive, **options)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return current[0](*args, **kwargs)

        self.when_imported.append(begin)
        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # Python's tools look these names up in every module
            raise AttributeError(name)
        return getattr(import_dynamo(), name)


def import_dynamo() -> ModuleType:
    """Import `torch._dynamo` now, if it has not been imported."""
    if not isinstance(later := sys.modules.get(_DYNAMO), _Later):
        return importlib.import_module(_DYNAMO)
    del sys.modules[_DYNAMO], vars(torch)["_dynamo"]
    dynamo = importlib.import_module(_DYNAMO)
    for begin in later.when_imported:
        begin(dynamo)
    return dynamo


_DYNAMO = "torch._dynamo"
if _DYNAMO not in sys.modules:
    sys.modules[_DYNAMO] = torch._dynamo = _Later(_DYNAMO)  # type: ignore[assignment]

OF_OPTIMIZERS = set(vars(torch.optim.SGD([nn.Parameter(torch.zeros(()))])))  # the attributes that every optimizer has


def has_compiler() -> bool:
    """Return whether torch.compile finds the C++ compiler (`CXX`, else g++). Without a compiler it fails at the first step."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


def compile_into(folder: Path, *, num_versions: int) -> None:
    """Make torch.compile keep its results only in this folder, and compile up to `num_versions` versions of a function.

    The caches are pickles. By default they are in a folder in /tmp with a name that anybody can guess. A folder that other
    users can write is not used. Above its limit of versions (8), torch silently stops compiling; a network with more shapes
    would reach this limit.
    """
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

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
