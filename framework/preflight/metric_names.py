"""The names of a task's metrics, read from the source of its methods: calling them would need a model and data."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from framework.config.components import locate
from framework.config.schema import Node


def metric_names(task: Node) -> list[str] | None:
    """Return the names that a task's `metrics` and `derived` return; None if the source does not list them plainly."""
    try:
        found = locate(str(task.get("_target_")))
    except ValueError:
        return None
    if not hasattr(found, "metrics"):
        return None
    names: list[str] = []
    for method in (getattr(found, name) for name in ("metrics", "derived") if hasattr(found, name)):
        returned = _returned(method)
        if returned is None:
            return None
        names += returned
    return list(dict.fromkeys(names)) or None


def _returned(method: Callable[..., Any]) -> list[str] | None:
    """Return the keys of the dictionaries that a method returns, if they are literals."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):
        return None
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    keys = [key for value in values if isinstance(value, ast.Dict) for key in value.keys]
    names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    is_plain = all(isinstance(value, ast.Dict) for value in values) and len(names) == len(keys)
    return names if is_plain else None
