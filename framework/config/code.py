"""The user's code that a run's components reach. It is found in the source files, without an import, and hashed by function.

Comments, docstrings, formatting and the order of imports do not change the hash.
"""

import ast
import copy
import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType

from framework.config.files_read import CONTENT, as_read, files_read, forget, hash_now, is_file
from framework.config.folders import DOTTED, EXTRAS, ROOT, enter_project
from framework.config.frozen_file import digest_of
from framework.runtime.exits import is_own_code

TOP_LEVEL = "the top level"

Functions = dict[str, str]  # the hash of each function's code, by the function's name in its module
_programs: set[str] = set()  # modules that the program which calls this framework has loaded between its commands
_loaded_by_commands: set[str] = set()
_depth = 0  # of `loading`
_reached: set[str] = set()  # modules that the imports of a component have reached, in this run or in another run
_imported_from: dict[str, tuple[ModuleSpec, bytes]] = {}  # loaded modules, with their sources when they were imported


@dataclass(frozen=True)
class Code:
    """The user's modules that a run's components reach, by name, and the other packages that these modules import.

    For a loaded module, this is the code that the process executes. `edited` names what its file has changed since.
    """

    modules: Mapping[str, Functions]
    packages: frozenset[str]
    folders: tuple[str, ...] = ()  # the folders of these modules
    edited: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return digest_of(self.modules)[:16]


def code_of(targets: Iterable[str], *, folders: Iterable[str] = (), loaded: Mapping[str, str] = MappingProxyType({})) -> Code:
    """Return the code that components with these dotted paths reach through the imports in their modules.

    A text that is the dotted path of a module counts as an import of the module. `folders` are searched too: the user's code
    may add folders to the path when it is imported. `loaded` are modules that no import reaches, each with its file (see
    `loaded_unseen`). Their imports are not followed, because the imported modules are loaded too.
    """
    enter_project()
    searched, found_in = tuple(folders), set[str]()
    waiting = [name for target in targets for name in prefixes(target)]
    files: dict[str, Functions] = {}
    packages: set[str] = set()
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        spec = find_module(name, searched)
        if spec is None:
            continue
        if spec.origin is None or not _is_users(spec.origin):
            packages |= {name.split(".")[0]} if spec.origin is not None and "." not in name else set()
            continue
        if "." not in name:
            found_in.add(str(Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]))
        package = name if spec.submodule_search_locations else name.rpartition(".")[0]
        files[name], imported = _read(Path(spec.origin).read_bytes(), package=package)
        waiting += imported
    _reached.update(files)
    for name in loaded.keys() - files.keys():
        spec = None if is_file(name) else find_module(name, searched)
        origin = Path(name if is_file(name) else loaded[name] if spec is None or spec.origin is None else spec.origin)
        if origin.suffix == ".py" and origin.is_file():
            files[name], _ = _read(origin.read_bytes(), package="")
        elif origin.is_file() and os.access(origin, os.R_OK):
            files[name] = {CONTENT: hash_now(origin)}
    modules = {name: _executed(name, functions) for name, functions in files.items()}
    packages -= {"framework"} | sys.stdlib_module_names
    return Code(modules, frozenset(packages), tuple(sorted(found_in)), tuple(changed(modules, files)))


def _executed(name: str, functions: Functions) -> Functions:
    """Return the code that this process executes as a module. `functions` is the code in the module's file now.

    A reload gives a module a new spec. A module of this name may have been loaded from another folder.
    """
    if is_file(name):
        return dict(as_read(name, functions))
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None:
        return functions
    if name not in _imported_from or _imported_from[name][0] is not spec:
        origin = Path(spec.origin or "")
        if not origin.is_file():
            return functions
        _imported_from[name] = spec, origin.read_bytes()
    return _read(_imported_from[name][1], package="")[0]


def note_import(name: str, source: bytes) -> None:
    """Note the source with which a module is imported: its file may change afterwards."""
    if (spec := getattr(sys.modules.get(name), "__spec__", None)) is not None:
        _imported_from[name] = spec, source


@contextmanager
def loading() -> Iterator[None]:
    """Attribute what is loaded and read meanwhile to this command, others that nothing imports to the calling program."""
    global _depth
    if not _depth:
        forget()
        _programs.update(sys.modules.keys() - _loaded_by_commands)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            _loaded_by_commands.update(sys.modules.keys() - _programs)


def own_modules(targets: Iterable[str]) -> dict[str, ModuleType]:
    """Return the user's loaded modules: those that components with these dotted paths reach, and any others."""
    names = code_of(targets).modules.keys() | loaded_unseen().keys()
    return {name: sys.modules[name] for name in sorted(names) if name in sys.modules}


def loaded_unseen() -> dict[str, str]:
    """Return the user's loaded modules that `code_of` does not find, because no import leads to them, each with its file.

    Examples: modules with computed names, plug-ins that a program finds in a folder, a file that is executed as a module. Also
    return the files that components have read when they were built.
    """
    if not _depth:
        return {}
    names = sorted(sys.modules.keys() - _programs - _reached - {"__main__", "__mp_main__"})
    origins = {name: getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) for name in names}
    modules = {name: origin for name, origin in origins.items() if isinstance(origin, str) and _is_users(origin)}
    return modules | files_read()


def changed(before: Mapping[str, Functions], after: Mapping[str, Functions]) -> list[str]:
    """Return the differences between the modules of two runs, one line per file: `mypkg/net.py: Net.forward, helper`.

    Of files that components have read, those that both have count.
    """
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if is_file(name):
            lines += [f"{name} has other content"] if None not in (old, new) and old != new else []
        elif old is None or new is None:
            lines.append(f"{name.replace('.', '/')}.py is {'new' if old is None else 'deleted, or no longer imported'}")
        elif differing := sorted(part for part in old.keys() | new.keys() if old.get(part) != new.get(part)):
            lines.append(f"{name.replace('.', '/')}.py: {', '.join(differing)}")
    return lines


# --- modules


def prefixes(path: str) -> list[str]:
    """Return the dotted path and all its prefixes, which are the names of the enclosing packages."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


@functools.cache
def find_module(name: str, folders: tuple[str, ...]) -> ModuleSpec | None:
    """Return where a module is, or None if it does not exist. Import nothing."""
    parent, _, last = name.rpartition(".")
    if name == "__main__":  # a script that starts runs
        file = Path(getattr(sys.modules[name], "__file__", None) or "")
        return ModuleSpec(name, None, origin=str(file)) if file.suffix == ".py" and file.is_file() else None
    if not parent:
        spec = PathFinder.find_spec(name)
        if name == "models":  # the user's package and the framework's package are joined
            ours = PathFinder.find_spec(name, [str(ROOT)])
            return ours if spec is None else spec
        if spec is None and name not in sys.stdlib_module_names:
            try:
                spec = importlib.util.find_spec(name)  # found by another finder: an editable installation
            except (ImportError, ValueError):
                return None
        return PathFinder.find_spec(name, list(folders)) if spec is None else spec
    package = find_module(parent, folders)
    if package is None or package.submodule_search_locations is None:
        return None
    places = [*package.submodule_search_locations, *([str(ROOT / "models")] if parent == "models" else [])]
    return PathFinder.find_spec(last, places)  # with the whole name, a namespace package asks for its parent


@functools.cache
def _is_users(origin: str) -> bool:
    """Return whether a module is the user's: not Python's, not an installed package's, and not the framework's.

    Our models always count as the user's, so that a run can move between a checkout and an installation.
    """
    if origin.endswith(".py") and is_own_code(origin):
        return not Path(origin).resolve().is_relative_to(EXTRAS)
    return "models" in origin and Path(origin).resolve().is_relative_to(ROOT / "models")


# --- sources


@functools.cache  # a start calls this several times, and each job of a sweep does too
def _read(source: bytes, *, package: str) -> tuple[Functions, list[str]]:
    """Return a source's functions and the names that it imports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {TOP_LEVEL: _hash(source)}, []
    return functions_of(tree), _imported(tree, package=package)


def _imported(tree: ast.Module, *, package: str) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [name for alias in node.names for name in prefixes(alias.name)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            names += prefixes(node.value)  # for importlib.import_module(), or a component's `_target_`
        elif isinstance(node, ast.Call) and _is_import(node.func):
            names += [
                value.value for value in node.args[:1] if isinstance(value, ast.Constant) and isinstance(value.value, str)
            ]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [name for alias in node.names for name in prefixes(f"{base}.{alias.name}")]
    return names


def _is_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def functions_of(tree: ast.Module) -> Functions:
    """Return the hash of each function and each class body of a module, and the hash of the remaining top-level code."""
    parts: dict[str, list[str]] = {}
    _collect(tree.body, "", parts)
    return {name: _hash("\n".join(lines).encode()) for name, lines in parts.items()}


def _collect(body: list[ast.stmt], prefix: str, parts: dict[str, list[str]]) -> None:
    own = parts.setdefault(prefix.rstrip(".") or TOP_LEVEL, [])
    imports: list[str] = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            own.append(f"def {node.name}")
            parts.setdefault(prefix + node.name, []).append(_text(node))
        elif isinstance(node, ast.ClassDef):
            head = copy.copy(node)
            head.body = []
            own.append(f"class {node.name}")
            parts.setdefault(prefix + node.name, []).append(_text(head))
            _collect(node.body, f"{prefix}{node.name}.", parts)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            where = f"{'.' * node.level}{node.module or ''}" if isinstance(node, ast.ImportFrom) else ""
            imports += [f"{where} {alias.name} {alias.asname or ''}" for alias in node.names]
        elif not _is_text(node):
            own.append(_text(node))
    own += sorted(imports)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class _WithoutTexts(ast.NodeTransformer):
    """A transformer that removes docstrings and other texts that are statements."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if _is_text(node) else self.generic_visit(node)


def _text(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(_WithoutTexts().visit(node)))


def _hash(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=8).hexdigest()
