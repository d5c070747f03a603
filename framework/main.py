"""The command line `steadfast ...`, which is the same as `python train.py ...`."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from framework import __version__
from framework.config.arguments import COMMANDS, split_flags
from framework.config.code import loading
from framework.config.folders import EXTRAS, ROOT, config_name, folders
from framework.config.help import help_text, version_text
from framework.config.modes import MODES
from framework.config.targets import locate
from framework.launch.decision import print_problems
from framework.launch.other import other_launcher
from framework.runtime.environment import Environment, SrunTask, variables
from framework.runtime.exits import Exit
from framework.runtime.log import speak
from framework.runtime.preemption import PREEMPTION
from framework.runtime.problem import Problem
from framework.runtime.program import end_process, keep_cuda_for_children, program, start_problems, typed_override

_PACKAGED = Path(__file__).with_name("project")  # the folder in an installation
TEMPLATE = _PACKAGED if _PACKAGED.is_dir() else ROOT / "examples" / "project"


@loading()
def main(arguments: list[str]) -> int:
    """Run a command line and return the exit code."""
    keep_cuda_for_children()
    if problems := start_problems():
        print(*problems, sep="\n", file=sys.stderr)
        return Exit.CONFIGURATION
    if arguments and (named := COMMANDS.get(arguments[0]) or _program(arguments[0])):
        code: int = locate(named)(arguments[1:])
        return code
    try:
        is_launched = Environment.read().is_launched or SrunTask.read() is not None or other_launcher() is not None
    except ValueError as error:
        return print_problems([Problem.of_line(str(error))])
    flags, overrides, problems = split_flags(arguments, is_launched=is_launched)
    if wrong := _choose_folders(flags):
        return print_problems(problems + wrong)
    if overrides and (path := COMMANDS.get(overrides[0])) and not problems:  # after a flag
        after: int = locate(path)(overrides[1:])
        return after
    overrides, unknown = with_mode(overrides)
    if unknown:
        return print_problems(problems + unknown)
    if not problems and flags.keys() & {"--help", "--version"}:
        print(help_text(overrides) if "--help" in flags else version_text(__version__))
        return Exit.FINISHED
    return _compose_and_run(flags, overrides, problems, is_launched=is_launched)


def _compose_and_run(flags: dict[str, str], overrides: list[str], problems: list[Problem], *, is_launched: bool) -> int:
    from framework.cli.run import checked_line, start  # imported late, with Hydra and pydantic: --help needs neither
    from framework.config.compose import as_yaml
    from framework.config.hydra_compose import is_multirun, print_by_hydra
    from framework.config.overrides import parse

    if any(override.key_or_group == "hydra.verbose" and override.value() for override in map(parse, overrides) if override):
        variables()["STEADFAST_VERBOSE"] = "1"
    if flags.pop("--json", None) is not None:
        if "mode=status" not in overrides:
            return print_problems([Problem("--json", "is for status, show, diff and why", "steadfast status --json")])
        variables()["STEADFAST_JSON"] = "1"
    if flags.keys() == {"--multirun"} or (not flags and not is_launched and is_multirun(overrides)):
        from framework.sweep.sweep import sweep  # imported late: a single run does not need it

        return sweep([text for text in overrides if not text.startswith("hydra.mode=")], problems)
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


def _program(word: str) -> str:
    """Return the path of the program of this name in the extras, if there is one: of its function `main`."""
    is_one = word.isidentifier() and (EXTRAS / word / "__main__.py").is_file()
    return f"{EXTRAS.name}.{word}.__main__.main" if is_one else ""


def with_mode(words: list[str]) -> tuple[list[str], list[Problem]]:
    """Return the overrides of an action that is the first word: `eval RUN key=value` is `mode=eval run.dir=RUN key=value`.

    Also return a problem, if RUN is no directory and does not name exactly one run.
    """
    mode = MODES.get(words[0]) if words else None
    if mode is None:
        return words, []
    overrides, problems = words[1:], list[Problem]()
    is_of_run = mode.about == "existing run" or mode.name == "cancel"
    if (is_of_run or mode.about == "root") and overrides and "=" not in overrides[0]:
        place = overrides.pop(0)
        if is_of_run and not Path(place).exists():
            from framework.cli.about_runs import find  # it imports what reads runs

            root = next((word.removeprefix("run.root=") for word in overrides if word.startswith("run.root=")), None)
            found = find(place, Path(root) if root else None)
            if isinstance(found, str):
                problems.append(Problem("run.dir", found, code=Exit.NO_VALID_CHECKPOINT))
            else:
                place = str(found)
        key = "run.dir" if is_of_run else "run.root"
        overrides.insert(0, shlex.split(typed_override(key, place))[0])  # quoted for Hydra alone
    return [f"mode={mode.name}", *overrides], problems


def _choose_folders(flags: dict[str, str]) -> list[Problem]:
    given = flags.pop("--config-dir", None) or flags.pop("--config-path", None)
    if folder := given or variables().get("STEADFAST_CONF"):
        if not Path(folder).is_dir():
            key = "--config-dir" if given else "STEADFAST_CONF"
            return [Problem(key, f"{folder} is not a directory", "a folder that holds groups, as conf/ does")]
        variables()["STEADFAST_CONF"] = str(Path(folder).resolve())
    name = flags.pop("--config-name", None)
    if name is not None:
        variables()["STEADFAST_CONFIG"] = name.removesuffix(".yaml")
        if not any((conf / f"{config_name()}.yaml").is_file() for conf in folders()):
            what = f"there is no {config_name()}.yaml in {' or '.join(map(str, folders()))}"
            return [Problem("--config-name", what, "a file with `defaults: [config]`")]
    return []


def init(arguments: list[str]) -> int:
    """Write the small project of `steadfast init PATH`. PATH must be missing or an empty directory. Return the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("init: needs one path (steadfast init PATH)", file=sys.stderr)
        return Exit.CONFIGURATION
    target = Path(arguments[0])
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        print(f"init: {target} exists already (a new path, or an empty directory)", file=sys.stderr)
        return Exit.CONFIGURATION
    try:
        shutil.copytree(TEMPLATE, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        (target / "gitignore").rename(target / ".gitignore")
    except OSError as error:
        print(f"init: {target} cannot be written: {error.strerror}", file=sys.stderr)
        return Exit.DISK
    there = program().replace(" train.py", f" {shlex.quote(str(ROOT / 'train.py'))}")
    print(f"{target} is a project: cd {shlex.quote(str(target))} && {there} experiment=first")
    return Exit.FINISHED


def entry() -> NoReturn:
    """Run this process's command line, and exit."""
    code = speak(main, sys.argv[1:])
    PREEMPTION.ignore()  # the work is done: a signal must not cause a failure while the interpreter ends
    end_process(code)
