"""Hooks of a LightningModule that change which of its parameters are trained: no checkpoint holds such a change."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from framework.runtime.exits import Unfit

_LATE = ("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_validation_epoch_end")
_CURE = (
    "requires_grad from the start, and part=unfreeze part.unfreeze.groups=[[backbone.*]] part.unfreeze.every=STEPS, "
    "which trains nothing of a group before"
)


def unfreezing(module: Any) -> str:
    """Return a refusal of the hooks whose source lets parameters train later, or an empty text."""
    for hook in _LATE:
        try:
            source = ast.parse(textwrap.dedent(inspect.getsource(getattr(type(module), hook))))
        except (OSError, TypeError, SyntaxError):
            continue
        if any(map(_unfreezes, ast.walk(source))):
            return f"{hook} changes later which parameters are trained ({_CURE})"
    return ""


def _unfreezes(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        sets = any(isinstance(target, ast.Attribute) and target.attr == "requires_grad" for target in node.targets)
        return sets and not _is_false(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        given = [*node.args, *(one.value for one in node.keywords)]
        return node.func.attr == "unfreeze" or (node.func.attr == "requires_grad_" and not any(map(_is_false, given)))
    return False


def _is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@contextmanager
def same_trained(module: Any, hook: str) -> Iterator[None]:
    """Raise Unfit if a hook in this context changes which parameters are trained."""
    before = _trained(module)
    yield
    if changed := sorted(before ^ _trained(module)):
        what = f"{hook} changes whether {changed[0]} is trained (requires_grad), and no checkpoint holds this change"
        raise Unfit(f"task: {what} ({_CURE})")


def _trained(module: Any) -> set[str]:
    return {name for name, parameter in nn.Module.named_parameters(module) if parameter.requires_grad}
