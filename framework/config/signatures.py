"""What a component takes and measures, read from its source: importing it would import torch, which costs seconds."""

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Argument:
    """One keyword-only argument of a component: what the user may set."""

    annotation: Any
    required: bool


@cache
def _definition(target: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Find the class or function `package.module.Name` in its source, without running it."""
    module, _, name = target.rpartition(".")
    for node in _source(module):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
    return None


@cache
def _source(module: str) -> list[ast.stmt]:
    """Return a module's statements; none if it has no source."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # it imports the packages around the module, which may raise anything
        return []
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return []
    return ast.parse(Path(spec.origin).read_text()).body


def _method(node: ast.ClassDef, name: str, *, module: str) -> ast.FunctionDef | None:
    """Return a method of a class in `module`, its own or inherited; None if there is none, or no source of it."""
    own = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    for base in node.bases if own is None else []:
        target = _where(ast.unparse(base), module)
        parent = _definition(target)
        if isinstance(parent, ast.ClassDef) and (found := _method(parent, name, module=target.rpartition(".")[0])):
            return found
    return own


def _where(name: str, module: str) -> str:
    """Return the dotted path of what a module calls `name`: its own, or imported."""
    first, _, rest = name.partition(".")
    for node in _source(module):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if first == (alias.asname or alias.name):
                    origin = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                    return f"{origin}.{rest}" if rest else origin
    return f"{module}.{name}"


def arguments_of(target: str) -> dict[str, Argument] | None:
    """Return the keyword-only arguments of the dotted path `target`; None if there is no such thing.

    What a component takes by position, or with a type that is not plain data, is the framework's to give, not the
    user's.
    """
    node = _definition(target)
    if isinstance(node, ast.ClassDef):
        node = _method(node, "__init__", module=target.rpartition(".")[0])
        if node is None:
            return {}
    if node is None:
        return None
    arguments = {}
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults):
        annotation = _plain_type(argument.annotation)
        if annotation is not None:
            arguments[argument.arg] = Argument(annotation=annotation, required=default is None)
    return arguments


_PLAIN = {t.__name__: t for t in (int, float, bool, str, list, dict)}


def _plain_type(node: ast.expr | None) -> Any:
    try:
        return _type(node)
    except (KeyError, TypeError, ValueError, SyntaxError):
        return None


def _type(node: ast.expr | None) -> Any:
    """Return the type of plain data that an annotation names. It is read, never run: the module may be anybody's."""
    match node:
        case ast.Name():
            return _PLAIN[node.id]
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(text)):
            return _type(ast.parse(text, mode="eval").body)
        case ast.BinOp(op=ast.BitOr()):
            return _type(node.left) | _type(node.right)
        case ast.Subscript(value=ast.Name(id="Literal")):
            return Literal[ast.literal_eval(node.slice)]  # type: ignore[valid-type]  # its values are data here
        case ast.Subscript(slice=ast.Tuple(elts=elements)):
            return _type(node.value)[tuple(_type(element) for element in elements)]
        case ast.Subscript():
            return _type(node.value)[_type(node.slice)]
    raise ValueError(f"{node} is no type of plain data")


def metrics_of(target: str) -> list[str] | None:
    """Return the names that a task's `metrics` and `derived` return; None if its source does not simply say them."""
    node = _definition(target)
    if not isinstance(node, ast.ClassDef):
        return None
    measured, derived = (_method(node, name, module=target.rpartition(".")[0]) for name in ("metrics", "derived"))
    returned = [
        n.value for method in (measured, derived) if method for n in ast.walk(method) if isinstance(n, ast.Return)
    ]
    if measured is None or not all(isinstance(value, ast.Dict) for value in returned):
        return None
    keys = [key for value in returned if isinstance(value, ast.Dict) for key in value.keys]
    names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return list(dict.fromkeys(names)) if names and len(names) == len(keys) else None
