"""The flags of the command line, and the messages for arguments that are neither a flag nor `key=value`."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence

from framework.config.modes import MODES
from framework.config.spelling import did_you_mean, done_here, nearest
from framework.runtime.problem import Problem
from framework.runtime.program import shell_word

_KEY = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
FOLDER_FLAGS = ("--config-dir", "--config-path", "--config-name")  # they can be combined with any other flag
_ALONE = ("--help", "--resolve", "--multirun", "--hydra-help", "--version", "--json")  # flags without a value
_SHORT = {"-h": "--help", "-c": "--cfg", "-m": "--multirun", "-sc": "--shell-completion",
          "-cd": "--config-dir", "-cp": "--config-path", "-cn": "--config-name"}  # fmt: skip
_CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--shell-completion": tuple(
        f"{what}={shell}" for shell in ("bash", "zsh", "fish") for what in ("install", "uninstall", "query")
    ),
}
_FLAGS = (*FOLDER_FLAGS, *_ALONE, *_CHOICES)
# Flags of Hydra that would change the meaning of a run, and the replacement for each flag.
_REFUSED = {
    **dict.fromkeys(("--package", "-p"), "--cfg job prints the whole"),
    **dict.fromkeys(("--run", "-r"), "a run is what there is without it"),
    **dict.fromkeys(("--experimental-rerun", "-er"), "the same command continues a run"),
}
COMMANDS = {  # actions that compose no run, imported when they are used: a run needs none of them
    "init": "framework.main.init",
    "promote": "framework.cli.promote.promote",
    "schema": "framework.config.generate.print_schema",
    "show": "framework.cli.about_runs.show",
    "diff": "framework.cli.about_runs.diff",
    "why": "framework.cli.about_runs.trace",
}


def split_flags(arguments: Sequence[str], *, is_launched: bool = False) -> tuple[dict[str, str], list[str], list[Problem]]:
    """Split a command line into flags with their values, overrides, and the problems of unknown or misused flags.

    `is_launched`: a launcher such as torchrun or mpirun has started this process as one of several processes.
    """
    flags: dict[str, str] = {}
    overrides: list[str] = []
    problems: list[Problem] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        flag, _, value = argument.partition("=")
        flag = _SHORT.get(flag, flag)
        if flag not in _ALONE and not value and waiting and _is_value(waiting[0], of=flag):
            value = waiting.pop(0)
        value = value or ("all" if flag == "--info" else "")
        if flag not in _FLAGS:
            problems.append(_unknown_flag(flag, value))
        elif flag in FOLDER_FLAGS and not value:
            problems.append(Problem(flag, "has no value", f"{flag} {'NAME' if flag == '--config-name' else 'DIR'}"))
        elif flag in _CHOICES and value not in _CHOICES[flag]:
            problems.append(Problem(flag, f"{value!r} is not valid", "one of " + ", ".join(_CHOICES[flag])))
        else:
            flags[flag] = value
    if "--multirun" in flags and is_launched:
        instead = "python train.py -m ..., with launch.nproc_per_node for the processes of each run"
        problems.append(Problem("-m", "a sweep cannot run under torchrun or mpirun", instead))
    others = [flag for flag in flags if flag not in ("--multirun", *FOLDER_FLAGS)]
    if "--multirun" in flags and others:
        what = "is for one run, and -m is for several"
        problems.append(Problem(others[0], what, "without -m; mode=plan -m lists the jobs"))
    if "--resolve" in flags and "--cfg" not in flags:
        problems.append(Problem("--resolve", "works only together with --cfg", "--cfg job --resolve"))
    return flags, overrides, problems


def _is_value(word: str, *, of: str) -> bool:
    takes_equals = any("=" in choice for choice in _CHOICES.get(of, ()))
    return not word.startswith("--") and (takes_equals or "=" not in word)


def _unknown_flag(flag: str, value: str) -> Problem:
    if flag in _REFUSED:
        return Problem(flag, "is a flag of Hydra that does not work here", _REFUSED[flag])
    if typo := difflib.get_close_matches(flag, _FLAGS, n=1, cutoff=0.8):
        return Problem(flag, "unknown flag", f"did you mean {typo[0]}?")
    word = flag.lstrip("-").replace("-", "_")
    if instead := done_here(word):
        return Problem(flag, "unknown flag", instead)
    key = nearest(word, _keys()) if len(word) > 1 else None
    if key is not None:
        return Problem(flag, "unknown flag", f"did you mean {key}={value or 'VALUE'}?")
    return Problem(flag, "unknown flag", "a key is set without dashes: key=value; --help lists keys and flags")


def _keys() -> list[str]:
    """Return the keys that a message may suggest."""
    from framework.config.schema import STATIC_KEYS  # imported late, with pydantic: only a message needs them

    return [*STATIC_KEYS, "optimizer.lr", "optimizer.weight_decay"]  # every optimizer has these two


def syntax_problem(text: str, *, parses: Callable[[str], bool], options: Mapping[str, Sequence[str]]) -> Problem:
    """Return why `text` is not `key=value`. `options` lists the options of each group."""
    key, equals, value = text.partition("=")
    key = key.lstrip("+~")
    if not equals:
        return Problem(text, "is not key=value", _meant_without_equals(text, options) or "key=value, or group=option")
    if not key.strip():
        return Problem(text, "has no key", "key=value, or group=option")
    if key != key.strip():
        return Problem(key.strip(), "a space before the = sign", f"did you mean {key.strip()}={value.strip()}?")
    if not _KEY.fullmatch(key) or ".." in key or key.endswith("."):
        return Problem(key, "unknown key", did_you_mean(key, _keys()) or "a key is words with dots between them")
    if value.startswith("="):
        return Problem(key, "two = signs", f"did you mean {key}={value.lstrip('=')}?")
    if value.isdecimal():
        return Problem(key, f"an integer of {len(value)} digits", "at most 19 digits, the limit of 64 bits")
    return Problem(key, f"{value[:60]} cannot be read", _remedy(key, value, parses))


def _meant_without_equals(text: str, options: Mapping[str, Sequence[str]]) -> str:
    if f"--{text}" in _FLAGS:
        return f"did you mean --{text}?"
    actions = [*MODES, *COMMANDS]
    if text in actions:
        return f"{text} must be the first word" if text in COMMANDS else f"did you mean mode={text}?"
    groups = [group for group, names in options.items() if text in names]
    if groups:
        return f"did you mean {groups[0]}={text}?"
    if action := difflib.get_close_matches(text, actions, n=1, cutoff=0.7):
        return f"did you mean {action[0]}?"
    key, _, value = text.replace(":", " ", 1).partition(" ")
    meant = nearest(key, _keys())
    return f"did you mean {meant}={value.strip() or 'VALUE'}?" if meant else ""


def _remedy(key: str, value: str, parses: Callable[[str], bool]) -> str:
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) > value.count(closing):
            return f"a {opening} is not closed"
        if value.count(opening) < value.count(closing):
            return f"a {closing} was never opened"
    for quote in ("'", '"'):
        if value.count(quote) % 2:
            return f"a quote {quote} is not closed"
    if value.startswith("~"):
        return "the shell does not replace ~ here; did you mean $HOME" + value[1:] + "?"
    quoted = f"{key}={_with_quotes(value, parses)}"
    return f"quoted for the shell and for Hydra: {shell_word(quoted)}" if parses(quoted) else "quote it"


_TEXTS = re.compile(r"""(?P<quoted>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|[^][{},"']+""")  # the texts in a list


def _with_quotes(value: str, parses: Callable[[str], bool]) -> str:
    """Return a value with quotes. In a list or a mapping, quote the texts that Hydra cannot read."""
    if value[:1] not in ("[", "{"):
        return f"'{value}'"
    quote = '"' if '"' in value else "'"

    def quoted(found: re.Match[str]) -> str:
        text = found[0].strip()
        return found[0] if found["quoted"] or not text or parses(f"key={text}") else f"{quote}{text}{quote}"

    return _TEXTS.sub(quoted, value)
