"""The output of `python train.py --help`. It is made from the comments in `conf/`, so it shows new options automatically."""

import os
import platform
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from framework.config.folders import CONF, defaults_in, groups, named_keys, option_file, option_node, options, value_names

_WIDEST, _OF_TEXT = 120, 30  # in columns: the widest line; the minimum for a comment beside its key
_QUOTED, _NO_BREAK = re.compile(r'"[^"]*"'), "\0"  # the quoted texts of a command, which must not be split


def help_text(overrides: list[str], *, width: int | None = None) -> str:
    """Return the help of the options that the line chooses. If it chooses none, return the usage and all groups and keys.

    `width` is in columns; None means the terminal's width.
    """
    width = _terminal_width() if width is None else width
    chosen = [(group, option) for group, _, option in (text.partition("=") for text in overrides)
              if group in groups() and option in options(group)]  # fmt: skip
    if chosen:
        return "\n\n".join("\n".join(_option_help(group, option, width)) for group, option in chosen)
    return "\n".join(_whole_help(width))


def _whole_help(width: int) -> Iterator[str]:
    usage = Path(__file__).with_name("usage.txt").read_text()
    if Path(sys.argv[0]).name == "steadfast":  # an installation has no train.py
        usage = usage.replace("python train.py", "steadfast")
    for line in usage.splitlines():
        command, gap, text = re.fullmatch(r" *(.*?)(?:( {3,})(.*))?", line).groups(default="")  # type: ignore[union-attr]
        yield from _command(command, text, width, column=line.find(text) - 1) if line.startswith("  ") else [line]
    yield "\nGroups: choose with group=option (* is the default)\n"
    defaults = defaults_in(CONF / "config.yaml")
    for group in groups():
        if options(group):
            yield f"  {group}"
            for name in options(group):
                mark = "*" if name == defaults.get(group) else " "
                yield from _line(f"{mark} {name}", _comment(group, name), width, column=20)
    yield "\nKeys: set with key=value\n"
    yield from _keys((CONF / "config.yaml").read_text().partition("\n\n")[2], width)
    yield ""
    yield from textwrap.wrap("An option's own keys: GROUP=OPTION --help, as in model=gpt --help", width)


def _option_help(group: str, option: str, width: int) -> Iterator[str]:
    from framework.config.schema import SEVERAL  # imported late, with pydantic: the whole help does not need it

    text = option_file(group, option).read_text(errors="replace")
    is_global = text.startswith("# @package _global_")
    target = option_node(group, option).get("_target_")
    yield from textwrap.wrap(f"{group}={option}  {_comment(group, option)}".rstrip(), width, subsequent_indent="  ")
    if target:
        yield f"  {target}"
    yield from _keys(text, width, *([] if is_global or group in SEVERAL else [group]))
    for key in (key for key in named_keys() if key.rpartition(".")[0] == group):
        for name in value_names(key, option_node(group, option)):
            yield from _line(f"{key}={name}", _comment(key, name), width, column=40)


def _terminal_width() -> int:
    """Return the width of the reader's terminal in columns, also through a pager. For a file, return a readable width."""
    for descriptor in (1, 2):
        with suppress(OSError):
            return max(20, min(os.get_terminal_size(descriptor).columns or _WIDEST, _WIDEST))
    return _WIDEST


def version_text(version: str) -> str:
    """Return the version of the framework, and the versions of its main packages, without importing torch."""
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "hydra-core"))
    return f"Steadfast {version}, with {packages}, Python {platform.python_version()}"


def _line(left: str, right: str, width: int, *, column: int) -> list[str]:
    """Return a key or option with its comment. The comment is wrapped beside it, or below it if there is little space."""
    beside = f"  {left:<{column}} "
    if width - column - 3 >= max(_OF_TEXT, *map(len, right.split()), 0):
        return _wrapped(right, width, first=beside, other=" " * (column + 3)) if right else [beside.rstrip()]
    return [f"  {left}", *_wrapped(right, width, first=" " * 6, other=" " * 6)]


def _command(command: str, text: str, width: int, *, column: int) -> list[str]:
    """Return a line of the usage. The user can paste a command even if it takes several lines."""
    if text and column + len(text) < width:
        return [f"  {command:<{column - 2}} {text}"]
    whole = _QUOTED.sub(lambda found: found[0].replace(" ", _NO_BREAK), command)
    words = textwrap.wrap(whole, width - 4, break_long_words=False, break_on_hyphens=False)  # 4: the margin, and a backslash
    lines = " \\\n  ".join(words).replace(_NO_BREAK, " ").splitlines()
    below = _wrapped(text, width, first=" " * 6, other=" " * 6) if text else []
    return [*(f"  {line}" for line in lines), *below]


def _wrapped(text: str, width: int, *, first: str, other: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=other, break_on_hyphens=False)


def _comment(group: str, name: str) -> str:
    lines = option_file(group, name).read_text(errors="replace").splitlines()
    first = next((line for line in lines if not line.startswith("# @package")), "")
    return first.removeprefix("# ") if first.startswith("#") else ""


def _keys(text: str, width: int, *sections: str) -> list[str]:
    lines, above, indents = [], list(sections), [0] * len(sections)
    for line in text.splitlines():
        content, _, comment = line.partition(" #")
        name, colon, value = content.strip().partition(":")
        if not colon or content.lstrip().startswith(("#", "-")) or name in ("_target_", "defaults"):
            continue
        indent = len(content) - len(content.lstrip())
        while len(above) > len(sections) and indents[-1] >= indent:
            above.pop(), indents.pop()
        if value.strip() and above[:1] != ["hydra"] and name != "hydra":
            lines += _line(".".join([*above, name]) + "=" + value.strip(), comment.strip(), width, column=40)
        above.append(name)
        indents.append(indent)
    return lines
