"""Freezing: parameters, by patterns of their names, that are not trained."""

import difflib
import fnmatch
from collections.abc import Sequence

from torch import nn


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Have the parameters that match one of the patterns (`*` and `?`, over the whole name) want no gradient.

    A tied weight goes by any of its names. ValueError for a pattern that matches none, and if nothing is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = fnmatch.filter(named, pattern)
        if not matching:
            raise ValueError(f"{pattern!r} matches no parameter of the model ({_expected(pattern, model)})")
        for name in matching:
            named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError(f"{', '.join(patterns)}: every parameter is frozen, and nothing is left to train")


def _expected(pattern: str, model: nn.Module) -> str:
    """Return the pattern that was probably meant, or some that there are."""
    of_modules = [f"{name}.*" for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if f"{pattern}.*" in of_modules:
        return f"did you mean {pattern}.*?"
    return nearest(pattern, [*of_modules, *names])


def nearest(pattern: str, names: Sequence[str]) -> str:
    """Say which name was probably meant by a pattern that matches none of them."""
    close = difflib.get_close_matches(pattern, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names[:5])}, ..."
