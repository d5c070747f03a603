"""The annotations of a component's arguments, found in its source file without an import."""

import ast
import functools
import re
from pathlib import Path

from framework.config.code import find_module
from framework.config.folders import enter_project


def number_arguments(target: str) -> frozenset[str]:
    """Return the arguments that the source of a function or class annotates as `float`, or as lists of it. Import nothing."""
    enter_project()
    module, _, name = target.rpartition(".")
    spec = find_module(module, ()) if module else None
    source = Path(spec.origin or "") if spec is not None else Path()
    return _numbers(source.read_bytes(), name) if source.suffix == ".py" else frozenset()


_IN_NUMBERS = {"float", "None", "Optional", "Union", "list", "tuple", "List", "Tuple", "Sequence",
               "Mapping", "dict", "str", "Annotated", "Field", "ge", "gt", "le", "lt", "Ge", "Gt", "Le", "Lt"}  # fmt: skip


@functools.cache
def _numbers(source: bytes, name: str) -> frozenset[str]:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return frozenset()
    found = _last(body, name)
    found = _last(found.body, "__init__") if isinstance(found, ast.ClassDef) else found
    arguments = [*found.args.args, *found.args.kwonlyargs] if isinstance(found, ast.FunctionDef) else []
    aliases = {target.id: _words(node.value) for node in body if isinstance(node, ast.Assign)
               for target in node.targets if isinstance(target, ast.Name)}  # fmt: skip

    def is_number(annotation: ast.expr) -> bool:
        words = set().union(*(aliases.get(word, {word}) for word in _words(annotation)))
        return "float" in words and words <= _IN_NUMBERS

    return frozenset(one.arg for one in arguments if one.annotation is not None and is_number(one.annotation))


def _words(node: ast.expr) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", ast.unparse(node)))


def _last(body: list[ast.stmt], name: str) -> ast.stmt | None:
    return next((node for node in reversed(body) if getattr(node, "name", "") == name), None)
