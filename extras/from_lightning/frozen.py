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


def unfreezing(module: Any) -> str:
    """Return a refusal of the hooks whose source lets parameters train later, or an empty text."""
    for hook in _LATE:
        try:
            source = ast.parse(textwrap.dedent(inspect.getsource(getattr(type(module), hook))))
        except (OSError, TypeError, SyntaxError):
            continue
        if any(map(_unfreezes, ast.walk(source))):
            return f"{hook} changes later which parameters are trained ({_cure('NAME.*')})"
    return ""


def _cure(pattern: str) -> str:
    part = f"part=unfreeze part.unfreeze.groups=[[{pattern}]] part.unfreeze.every=STEPS"
    return f"requires_grad from the start, and {part}, which trains nothing of a group before"


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
    before = [(parameter, parameter.requires_grad) for parameter in nn.Module.parameters(module)]
    yield
    changed = {id(parameter) for parameter, is_trained in before if parameter.requires_grad != is_trained}
    if changed:
        name = next(name for name, parameter in nn.Module.named_parameters(module) if id(parameter) in changed)
        what = f"{hook} changes whether {name} is trained (requires_grad), and no checkpoint holds this change"
        raise Unfit(f"task: {what} ({_cure(name.rpartition('.')[0] + '.*')})")
