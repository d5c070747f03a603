"""The command line: `steadfast ...`, which is `python train.py ...`."""

import sys
from pathlib import Path
from typing import NoReturn

from framework.cli.run import checked_line, start
from framework.config.arguments import split_flags
from framework.config.compose import as_yaml, print_by_hydra
from framework.config.folders import config_name, folders
from framework.config.help import help_text, version_text
from framework.config.overrides import parse
from framework.launch.claim import print_problems
from framework.runtime.environment import Environment, variables
from framework.runtime.exits import Exit
from framework.runtime.log import speak
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem


def main(arguments: list[str]) -> int:
    """Run a command line and return the exit code."""
    if arguments[:1] == ["init"]:
        from framework.init import write_project

        return write_project(arguments[1:])
    flags, overrides, problems = split_flags(arguments, is_launched=Environment.read().is_launched)
    if wrong := _choose_folders(flags):
        return print_problems(problems + wrong)
    if not problems and flags.keys() & {"--help", "--version"}:
        print(help_text(overrides) if "--help" in flags else version_text())
        return Exit.FINISHED
    if any(override.key_or_group == "hydra.verbose" and override.value() for override in map(parse, overrides) if override):
        variables()["STEADFAST_VERBOSE"] = "1"
    if flags.keys() == {"--multirun"}:
        from framework.sweep.sweep import sweep  # not spent by a single run

        return sweep(overrides, problems)
    if "--hydra-help" in flags and not problems:
        print_by_hydra(flags, overrides)
        return Exit.FINISHED
    if flags.keys() - {"--shell-completion"} or problems:
        problems += checked_line(overrides).problems
    if problems:
        return print_problems(problems)
    if flags.get("--cfg") == "job":
        print(as_yaml(overrides, resolve="--resolve" in flags), end="")
        return Exit.FINISHED
    if flags:
        print_by_hydra(flags, overrides)
        return Exit.FINISHED
    return start(overrides)


def _choose_folders(flags: dict[str, str]) -> list[Problem]:
    """Take the flags that say which configuration; every process that this one starts inherits the choice."""
    folder = flags.pop("--config-dir", None) or flags.pop("--config-path", None)
    if folder is not None:
        if not Path(folder).is_dir():
            return [Problem("--config-dir", f"{folder} is not a directory", "a folder that holds groups, as conf/ does")]
        variables()["STEADFAST_CONF"] = str(Path(folder).resolve())
    name = flags.pop("--config-name", None)
    if name is not None:
        variables()["STEADFAST_CONFIG"] = name.removesuffix(".yaml")
        if not any((conf / f"{config_name()}.yaml").is_file() for conf in folders()):
            what = f"there is no {config_name()}.yaml in {' or '.join(map(str, folders()))}"
            return [Problem("--config-name", what, "a file with `defaults: [config]`")]
    return []


def entry() -> NoReturn:
    """Run this process's command line, and exit."""
    code = speak(main, sys.argv[1:])
    PREEMPTION.ignore()  # all is done: a signal must not make this a failure while the interpreter is taken down
    sys.exit(code)
