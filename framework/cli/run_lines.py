"""Lines about a run, used by `show`, `diff` and `why`."""

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from framework.runs.directory import RunDirectory

_MOST_LINES = 40  # per list
_WIDEST, _BEFORE = 60, 20  # characters of a cut text, and how many of them may be before the first difference


def state_line(directory: RunDirectory) -> str:
    error = directory.read_summary().get("error")
    return directory.state + (f": {' '.join(str(error).split())}" if error else "")


def command_of(start: dict[str, Any]) -> str:
    """Return the command of a start as a user would type it: without the paths of the interpreter and of `steadfast`."""
    try:
        words = shlex.split(str(start.get("command", "")))
    except ValueError:
        return str(start.get("command", ""))
    is_installed = [os.path.basename(word) for word in words[1:2]] == ["steadfast"]
    words = ["steadfast", *words[2:]] if is_installed else [os.path.basename(word) for word in words[:1]] + words[1:]
    variables = start.get("environment")
    before = [f"{name}={shlex.quote(str(value))} " for name, value in variables.items()] if isinstance(variables, dict) else []
    return "".join(before) + shlex.join(words)


def label_of(path: Path) -> str:
    return "/".join(path.resolve().parts[-2:])


def items_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def told_apart(texts: Sequence[str]) -> list[str]:
    """Return two different texts, cut to the part in which they begin to differ if one is long."""
    begin = max(0, len(os.path.commonprefix([*texts])) - _BEFORE) if max(map(len, texts)) > _WIDEST else 0
    end = begin + _WIDEST
    return ["... " * (begin > 0) + text[begin:end] + " ..." * (len(text) > end) for text in texts]


def aligned(pairs: Iterable[tuple[str, str]]) -> list[str]:
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"  {name:{width}}  {text}" for name, text in pairs]


def section(title: str, items: list[Any], *, is_pairs: bool = True) -> list[str]:
    lines = aligned(items) if is_pairs else [f"  {text}" for text in items]
    left = len(lines) - _MOST_LINES
    return ["", title, *lines[:_MOST_LINES], *([f"  ... and {left} more"] if left > 0 else [])] if lines else []
