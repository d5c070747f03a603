"""Composing the configuration: from a command line to plain, resolved data."""

import copy
import io
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.config.arguments import syntax_problem
from framework.config.identity import EXECUTION, _flat, identity
from framework.config.renamed import renamed
from framework.config.spelling import did_you_mean
from framework.runtime.problem import Problem, shown

CONF = Path(__file__).resolve().parents[2] / "conf"


def _resolve_run_id(_root_: DictConfig) -> str:
    # the branches that the identity leaves out are the ones that mention the id
    plain: dict[str, Any] = {
        str(key): OmegaConf.to_container(_root_[key], resolve=True) if OmegaConf.is_config(_root_[key]) else _root_[key]
        for key in _root_
        if key not in EXECUTION
    }
    return identity(plain)


def register_resolvers() -> None:
    """Teach OmegaConf `${run_id:}`."""
    OmegaConf.register_new_resolver("run_id", _resolve_run_id, replace=True)


def compose(overrides: list[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Compose the configuration from `conf/` and the command line's overrides, resolved to plain data.

    Every override that cannot be applied becomes a `Problem` and is left out, so that one report can name them all;
    Hydra itself would stop at the first. With problems, the configuration is only good for finding more of them.
    """
    register_resolvers()
    choices, values, problems = _sort_overrides(overrides)
    try:
        config = _compose(choices)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:  # a YAML file that is wrong
        problems.append(Problem(" ".join(choices) or "conf", _one_line(error)))
        config = _compose([])
    OmegaConf.set_struct(config, False)
    for override in values:
        problems += _apply(config, override)
    plain, unresolved = _resolve(config)
    plain.setdefault("logger", {})
    plain = renamed(plain)
    problems += unresolved
    if not unresolved and isinstance(plain["run"], dict) and plain["run"].get("id") != identity(plain):
        what = "cannot be chosen: it is a hash of what decides the result"
        problems.append(Problem("run.id", what, "name and run.dir can"))
    return plain, problems


def _compose(choices: list[str]) -> DictConfig:
    return copy.deepcopy(_composed(CONF, tuple(choices)))


@cache  # a tenth of a second, which most jobs of a sweep have in common
def _composed(conf: Path, choices: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(config_dir=str(conf), version_base="1.3"):
        return hydra_compose("config", overrides=list(choices))


def _sort_overrides(overrides: list[str]) -> tuple[list[str], list[Override], list[Problem]]:
    """Split into the choices of group options (for Hydra), the values, and what is neither."""
    choices: list[str] = []
    values: list[Override] = []
    problems: list[Problem] = []
    for text in overrides:
        override = parse(text)
        if override is None or not override.key_or_group:
            options_of = {group: options(group) for group in groups()}
            problems.append(syntax_problem(text, parses=lambda t: parse(t) is not None, options=options_of))
        elif problem := _refusal(override, text):
            problems.append(problem)
        elif override.key_or_group in groups() and not isinstance(override.value(), dict):
            found = _choice_problems(override.key_or_group, override.value())
            problems += found
            if override.value() is not None and not found:
                choices.append(text.lstrip("+"))  # every group has a choice already: there is nothing to add
        else:
            values.append(override)
    return choices, values, problems


def parse(text: str) -> Override | None:
    """Parse one override, as Hydra does; None if it is none."""
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError):  # ValueError: an integer of more digits than Python converts
        return None


def groups() -> list[str]:
    """Return the names of the configuration's groups."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def options(group: str) -> list[str]:
    """Return the names of a group's options."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def option_node(group: str, option: str) -> dict[str, Any]:
    """Return what an option's file says, as it stands there."""
    return yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}


def is_hydras(key: str) -> bool:
    """Return whether a key or group is Hydra's own: `hydra.x` or `hydra/x`."""
    return key.split("/")[0].split(".")[0] == "hydra"


def _refusal(override: Override, text: str) -> Problem | None:
    key = override.key_or_group
    if is_hydras(key):
        what = "is Hydra's own and does nothing in a single run"
        return Problem(key, what, "run.root and run.dir say where a run goes")
    if override.type == OverrideType.DEL:
        return Problem(text, "a key cannot be deleted", "null switches off what can be off")
    if override.is_sweep_override():
        expected = "add -m; a list is written [1,2], a text with a comma \"'a,b'\""
        return Problem(key, "several values make a sweep", expected)
    if override.package is not None or "/" in key:
        word = text.partition("=")[0].lstrip("+")
        close = did_you_mean(key.split("/")[0], groups())
        return Problem(word, "unknown group", close or f"one of {', '.join(groups())}")
    return None


def _choice_problems(group: str, chosen: Any) -> list[Problem]:
    if isinstance(chosen, list) and group != "logger":
        return [Problem(group, f"{shown(chosen)} is not valid", f"one option, as in {group}={options(group)[0]}")]
    problems = []
    for name in chosen if isinstance(chosen, list) else [chosen]:
        if str(name) not in options(group) and (group, name) != ("experiment", None):
            expected = "one of " + ", ".join(options(group)) if options(group) else "there is none yet"
            close = did_you_mean(str(name), options(group))
            problems.append(Problem(group, f"no option {shown(name)}", expected + (f"; {close}" if close else "")))
    return problems


def _apply(config: DictConfig, override: Override) -> list[Problem]:
    key, value = override.key_or_group, override.value()
    sections = key.split(".")
    for depth in range(1, len(sections)):
        above = ".".join(sections[:depth])
        if _holds_value(config, above):
            return [Problem(key, "unknown key", f"{above} holds a value, not keys")]
    is_section = OmegaConf.is_dict(OmegaConf.select(config, key, throw_on_resolution_failure=False))
    if is_section and not isinstance(value, dict):
        return [Problem(key, f"{shown(value)} is not valid", f"a section, whose keys are set as in {key}.KEY=VALUE")]
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except (OmegaConfBaseException, AttributeError, TypeError, ValueError) as error:
        return [Problem(key, f"{shown(value)} is not valid", _one_line(error))]
    return []


def _holds_value(config: DictConfig, key: str) -> bool:
    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(config, parent, throw_on_resolution_failure=False) if parent else config
    if not OmegaConf.is_dict(node) or last not in node.keys():
        return False
    return not OmegaConf.is_config(node._get_node(last))


def _resolve(config: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """Return `config` as plain data, with null for each value that does not resolve."""
    problems: list[Problem] = []
    written: Any = OmegaConf.to_container(config)
    for key in [key for key, value in _flat(written).items() if value == "???"]:
        problems.append(Problem(key, "??? is not valid", "a value"))
        config = _with_null(config, key)
    while True:
        try:
            return OmegaConf.to_container(config, resolve=True), problems  # type: ignore[return-value]  # keys are strings
        except (OmegaConfBaseException, RecursionError) as error:
            key = getattr(error, "full_key", None) or "command line"
            is_new = all(problem.key != key for problem in problems)
            problems.append(Problem(key, "its interpolation does not resolve", _one_line(error)))
            if key == "command line" or not is_new:
                return {}, problems
            config = _with_null(config, key)


def _with_null(config: DictConfig, key: str) -> DictConfig:
    plain = node = OmegaConf.to_container(config, resolve=False)
    *above, last = key.replace("[", ".").replace("]", "").split(".")
    for part in above:
        node = node[int(part) if isinstance(node, list) else part]  # type: ignore[index,call-overload]
    node[int(last) if isinstance(node, list) else last] = None  # type: ignore[index,call-overload]
    return OmegaConf.create(plain)  # type: ignore[return-value]  # of a dict


def _one_line(error: Exception) -> str:
    if "ecursi" in str(error):  # OmegaConf tells one kind itself, and of the other only how deep Python's stack is
        return "it refers to itself"
    return " ".join(str(error).split("\n    full_key:")[0].split())


def print_by_hydra(flags: dict[str, str], overrides: list[str]) -> None:
    """Print what flags of Hydra's ask for: the configuration, its help, a shell's completion."""

    @hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
    def run_job(config: object) -> None:
        raise AssertionError("these flags print, and run nothing")

    register_resolvers()
    # flags first: argparse, which reads them for Hydra, takes none between overrides
    sys.argv[1:] = [*(word for flag in flags.items() for word in flag if word), *_force_values(overrides)]
    with redirect_stdout(io.StringIO()) as printed:  # Hydra tells of a reader that has left in a traceback
        run_job()
    print(printed.getvalue(), end="")


def _force_values(arguments: list[str]) -> list[str]:
    """Return the arguments with every value forced (`++key=value`): which keys there are, is ours to judge."""
    forced = []
    for argument in arguments:
        key = argument.partition("=")[0]
        is_value = "=" in argument and not argument.startswith(("-", "+", "~", "hydra")) and not (CONF / key).is_dir()
        forced.append(f"++{argument}" if is_value else argument)
    return forced
