"""What the user's code does when it is imported and built: its draws are seeded, and the files that it reads are noted."""

import builtins
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from framework.config.code import note_import
from framework.config.files_read import note
from framework.randomness import key, seeded
from framework.runtime.exits import is_own_code

_SYSTEM = tuple(map(Path, ("/etc", "/usr", "/proc", "/sys", "/dev", "/run", "/var")))


def seed_imports() -> None:
    """Let each module of the user draw the same numbers from torch, numpy and random in each process that imports it.

    A module that is executed without being imported (a file by its path) counts as a file that the code reads.
    """
    if "exec_module" in vars(SourceFileLoader):
        return
    execute = SourceFileLoader.exec_module

    def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
        if not is_own_code(loader.path):
            execute(loader, module)
            return
        source = Path(loader.path).read_bytes()
        with seeded(key(0, "import", module.__name__)):
            execute(loader, module)
        if sys.modules.get(module.__name__) is module:
            note_import(module.__name__, source)
        else:
            _note(loader.path)

    SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign, assignment]


@contextmanager
def noting_files() -> Iterator[None]:
    """Note the files that are opened to be read, by Python's open() or mapped by torch: they decide what the user's code is.

    What it writes too does not count, nor what is in hidden folders (caches, .git) or belongs to the machine (/etc, ...), nor
    the source of a loaded module, which is code already.
    """
    opens, builds = builtins.open, threading.get_ident()

    def noted_open(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        opened = opens(file, mode, *given, **named)
        if threading.get_ident() == builds:  # the framework's own threads have files too
            _note(file, is_written=not {*mode}.isdisjoint("wax+"))
        return opened

    def noted(function: Callable[..., Any], file: Any, *given: Any, **named: Any) -> Any:
        if threading.get_ident() == builds:
            _note(file)
        return function(file, *given, **named)

    replaced = [(builtins, "open", opens, noted_open), (io, "open", opens, noted_open),
                (io, "open_code", io.open_code, partial(noted, io.open_code))]  # fmt: skip
    if (storage := getattr(sys.modules.get("torch"), "UntypedStorage", None)) is not None:  # safetensors calls this too
        replaced.append((storage, "from_file", storage.from_file, partial(noted, storage.from_file)))
    for owner, name, _, new in replaced:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, before, _ in replaced:
            setattr(owner, name, before)


def _note(file: Any, *, is_written: bool = False) -> None:
    if not isinstance(file, (str, os.PathLike)):
        return
    path, here = Path(os.path.abspath(file)), Path.cwd()
    from_here = path.relative_to(here) if path.is_relative_to(here) else path
    is_hidden = any(part.startswith(".") for part in from_here.parts)
    is_of_system = from_here is path and any(map(path.is_relative_to, _SYSTEM))  # not a project there, as in a container
    if is_hidden or is_of_system or not is_own_code(str(path)) or (path.suffix == ".py" and _is_source(str(path))):
        return
    name = str(path) if from_here is path else f"./{from_here}"
    note(name, str(path), is_written=is_written)


def _is_source(path: str) -> bool:
    return any(getattr(module, "__dict__", {}).get("__file__") == path for module in [*sys.modules.values()])
