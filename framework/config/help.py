"""What `python train.py --help` prints: made from the comments in `conf/`, so that new options appear by themselves."""

import platform
from importlib import metadata
from pathlib import Path

from framework.config.folders import CONF, defaults_in, groups, option_file, option_node, options
from framework.config.schema import SEVERAL


def help_text(overrides: list[str]) -> str:
    """Return the help of the options that the line chooses; if it chooses none, the usage and all groups and keys."""
    chosen = [(group, option) for group, _, option in (text.partition("=") for text in overrides)
              if group in groups() and option in options(group)]  # fmt: skip
    if chosen:
        return "\n\n".join(_option_help(group, option) for group, option in chosen)
    parts = [Path(__file__).with_name("usage.txt").read_text(), "Groups: choose with group=option (* is the default)\n"]
    defaults = defaults_in(CONF / "config.yaml")
    for group in groups():
        if options(group):
            parts.append(f"  {group}")
            for name in options(group):
                mark = "*" if name == defaults.get(group) else " "
                parts.append(_line(f"{mark} {name}", _comment(group, name), width=20))
    parts.append("\nKeys: set with key=value\n")
    parts += _keys((CONF / "config.yaml").read_text().partition("\n\n")[2])
    parts.append("\nAn option's own keys: python train.py GROUP=OPTION --help, as in model=gpt --help")
    return "\n".join(parts)


def _option_help(group: str, option: str) -> str:
    text = option_file(group, option).read_text(errors="replace")
    is_global = text.startswith("# @package _global_")
    target = option_node(group, option).get("_target_")
    head = [f"{group}={option}  {_comment(group, option)}".rstrip(), *([f"  {target}"] if target else [])]
    return "\n".join([*head, *_keys(text, *([] if is_global or group in SEVERAL else [group]))])


def version_text(version: str) -> str:
    """Return the version, and those of what it runs with, without importing torch."""
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "hydra-core"))
    return f"Steadfast {version}, with {packages}, Python {platform.python_version()}"


def _line(left: str, right: str, *, width: int) -> str:
    line = f"  {left:<{width}} {right}".rstrip()
    return line if len(line) <= 120 else line[:117].rpartition(" ")[0] + " ..."


def _comment(group: str, name: str) -> str:
    lines = option_file(group, name).read_text(errors="replace").splitlines()
    first = next((line for line in lines if not line.startswith("# @package")), "")
    return first.removeprefix("# ") if first.startswith("#") else ""


def _keys(text: str, *sections: str) -> list[str]:
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
            lines.append(_line(".".join([*above, name]) + "=" + value.strip(), comment.strip(), width=40))
        above.append(name)
        indents.append(indent)
    return lines
