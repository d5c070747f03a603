"""torch's compiler: imported late, since that takes as long as importing torch, and with caches of the run's own.

Names of torch that are not public, as in `torch_internals`.
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
    """A part of `torch._dynamo` until then, with what torch uses of it."""

    def __init__(self, part: str, **used: Callable[[], Any]) -> None:
        self.part = part
        vars(self).update(used)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(import_dynamo(), self.part), name)


class _Later(ModuleType):
    """In the place of `torch._dynamo` until it is used: every optimizer imports it, which takes as long as importing torch.

    What optimizers, DDP and process groups use of it matters only to what is compiled: it is here. All else imports it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.utils = _LaterPart("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # the default: nobody has set another
        self.trace_rules = _LaterPart("trace_rules", clear_lru_cache=lambda: None)
        self.when_imported: list[Callable[[ModuleType], None]] = []

    def graph_break(self) -> None:
        """Do nothing: nothing is being compiled."""

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return a function that does the same, and is left out of what is compiled later."""
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
        if name.startswith("__") and name != "__path__":  # asked of every module by whoever looks for one
            raise AttributeError(name)
        return getattr(import_dynamo(), name)


def import_dynamo() -> ModuleType:
    """Import `torch._dynamo` now, if it has not been."""
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

OF_OPTIMIZERS = set(vars(torch.optim.SGD([nn.Parameter(torch.zeros(()))])))  # what any optimizer keeps in attributes


def has_compiler() -> bool:
    """Return whether torch.compile finds the C++ compiler (`CXX`, else g++) without which it fails at the first step."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


def compile_into(folder: Path, *, num_versions: int) -> None:
    """Let torch.compile keep what it compiles in this folder alone, and compile so many versions of a function.

    Its caches are pickles: by default in a folder in /tmp whose name anybody can guess. A folder that others can write is not
    used. Beyond its limit of versions (8) it silently stops compiling, which a network with more shapes would reach.
    """
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:  # another could put a pickle there
        folder = Path(tempfile.mkdtemp(prefix="compiled_"))
    variables()["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute())
    torch._inductor.config.fx_graph_cache = True
    torch._functorch.config.enable_autograd_cache = True
    torch._dynamo.config.automatic_dynamic_local_pgo = False
    torch._dynamo.config.recompile_limit = num_versions
    torch._dynamo.config.accumulated_recompile_limit = max(256, num_versions)
