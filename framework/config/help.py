"""What `python train.py --help` prints: made from the comments in `conf/`, so that new options appear by themselves."""

import platform
from importlib import metadata

from framework.config.folders import CONF, defaults_in, groups, option_file, option_node, options

_HEAD = """\
Steadfast: a run is its configuration.

  python train.py [group=option ...] [key=value ...]      one run; the same command continues it
  python train.py -m key=a,b,c ...                        a sweep
  torchrun --nproc-per-node=N train.py ...                the same run under torchrun
  python train.py --cfg job --resolve [...]               print the configuration of a command, and run nothing
  python train.py --version                               what this installation runs with
  eval "$(python train.py --shell-completion install=bash)"    Tab completes options and keys (docs/command_line.md)

Examples

  python train.py                                         a small CNN on handwritten digits
  python train.py model=vit optimizer.lr=1e-3 name=first
  python train.py model=gpt dataset=text precision=bf16 trainer.max_epochs=1
  python train.py parallel=ddp launch.nproc_per_node=2
  python train.py -m optimizer.lr=1e-3,3e-3 seed=0,1,2    six runs; with hydra/launcher=joblib several at a time
  python train.py mode=plan -m optimizer.lr=1e-3,3e-3     how they stand; runs none
  python train.py mode=status                             how all runs below run.root stand (of a sweep: its -m line)
  python train.py mode=eval run.dir=runs/default/ID       measure it; mode=export: use it elsewhere (docs/evaluate.md)
  python train.py mode=report run.root=runs               all runs of a root on one page (docs/reports.md)
  python train.py -m "optimizer.lr=tag(log, interval(1e-4, 1e-1))" hydra/sweeper=optuna    a search (docs/sweeps.md)
"""


def help_text(overrides: list[str]) -> str:
    """Return the help of the options that the line chooses; if it chooses none, the usage and all groups and keys."""
    chosen = [(group, option) for group, _, option in (text.partition("=") for text in overrides)
              if group in groups() and option in options(group)]  # fmt: skip
    if chosen:
        return "\n\n".join(_option_help(group, option) for group, option in chosen)
    parts = [_HEAD, "Groups: choose with group=option (* is the default)\n"]
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
    text = option_file(group, option).read_text()
    is_global = text.startswith("# @package _global_")
    target = option_node(group, option).get("_target_")
    head = [f"{group}={option}  {_comment(group, option)}".rstrip(), *([f"  {target}"] if target else [])]
    return "\n".join([*head, *_keys(text, *([] if is_global or group == "logger" else [group]))])


def version_text(version: str) -> str:
    """Return the version, and those of what it runs with, without importing torch."""
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "hydra-core"))
    return f"Steadfast {version}, with {packages}, Python {platform.python_version()}"


def _line(left: str, right: str, *, width: int) -> str:
    line = f"  {left:<{width}} {right}".rstrip()
    return line if len(line) <= 120 else line[:117].rpartition(" ")[0] + " ..."


def _comment(group: str, name: str) -> str:
    lines = option_file(group, name).read_text().splitlines()
    first = next((line for line in lines if not line.startswith("# @package")), "")
    return first.removeprefix("# ") if first.startswith("#") else ""


def _keys(text: str, *sections: str) -> list[str]:
    """Return the keys of a YAML text, a line each, as `section.key=value` with its comment."""
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
