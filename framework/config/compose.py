"""The composition of the configuration: from a command line to plain, resolved data."""

import copy
import io
import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import OverrideType
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.config.code import find_module
from framework.config.folders import (
    CONF,
    EXTRAS,
    config_name,
    defaults_in,
    folders,
    named_keys,
    option_node,
    options,
    own_folder,
    own_groups,
    value_names,
)
from framework.config.identity import EXECUTION, execution_keys, flat, identity, is_below
from framework.config.modes import MODES, Mode
from framework.config.overrides import apply, chosen_by_default, empty_replaced, key_of, one_line, parse, sort_overrides
from framework.config.schema import COMPONENTS, SEVERAL, RunConfig
from framework.config.spelling import did_you_mean
from framework.runtime.problem import Problem, shown


class Composed(NamedTuple):
    """The composed configuration. If there are problems, `config` may be empty; it only serves to find more problems."""

    config: dict[str, Any]
    problems: list[Problem]
    known: list[str]  # the keys of the chosen files
    given: list[str]  # the keys and groups that the command line names

    @property
    def mode(self) -> Mode | None:
        return MODES.get(str(self.config.get("mode")))


class _Folders(SearchPathPlugin):
    """A plugin that makes Hydra search all folders: the user's before the framework's, and the extras' after it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if (own := own_folder()) is not None:
            search_path.prepend("own", f"file://{own}", anchor="main")
        for folder in (folder for folder in folders() if folder.is_relative_to(EXTRAS)):
            search_path.append("extras", f"file://{folder}")


def forget_files() -> None:
    """Read the files again for the next composition: a program that lives on may have edited them."""
    _composed.cache_clear()
    defaults_in.cache_clear()
    find_module.cache_clear()


def prepare_hydra() -> None:
    """Register the folders with Hydra, and the resolvers `${run_id:}` and `${data:FACT}` with OmegaConf."""
    Plugins.instance().register(_Folders)
    OmegaConf.register_new_resolver("run_id", _run_id, replace=True)
    OmegaConf.register_new_resolver("data", lambda fact: f"${{data:{fact}}}", replace=True)  # the dataset resolves it later


def _run_id(_root_: DictConfig) -> str:
    # the identity excludes the sections that refer to the id
    plain: dict[str, Any] = {
        str(key): OmegaConf.to_container(_root_[key], resolve=True) if OmegaConf.is_config(_root_[key]) else _root_[key]
        for key in _root_
        if key not in EXECUTION
    }
    return identity(_without_own_groups(plain))


def compose_line(overrides: list[str]) -> Composed:
    """Compose the configuration from the folders and the command line's overrides, and resolve it to plain data.

    An override that cannot be applied becomes a `Problem` and is left out. So one report names all problems; Hydra would stop
    at the first.
    """
    config, known, problems = _applied(overrides)
    plain, unresolved = _resolve(config)
    for group in ("sampler", *SEVERAL):
        plain.setdefault(group, {})
    problems += unresolved
    plain = _without_own_groups(plain)
    problems += _changing(config, plain)
    if not unresolved and isinstance(plain.get("run"), dict) and plain["run"].get("id") != identity(plain):
        what = "cannot be set: it is a hash of the keys that decide the result"
        problems.append(Problem("run.id", what, "set name or run.dir"))
    for key, value in flat(plain).items():
        if "${data:" in str(value) and not is_below(key, (*COMPONENTS, *SEVERAL, "extra")):
            problems.append(Problem(key, f"{value} is not valid", "facts of the data are for components"))
    given = [override.key_or_group for override in map(parse, overrides) if override is not None]
    return Composed(plain, problems, known, given)


def as_yaml(overrides: list[str], *, resolve: bool) -> str:
    """Return the configuration of a command line in the format of `--cfg job`."""
    config, _, _ = _applied(overrides)
    return OmegaConf.to_yaml(config, resolve=resolve)


def launcher_and_sweeper(overrides: list[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return Hydra's launcher and sweeper from the chosen files and the command line: the option's name and its keys."""
    choices, _, _ = sort_overrides(overrides)
    hydras = _compose([*choices, *(text for text in overrides if text.startswith("hydra/"))], with_hydra=True).hydra
    plain: Any = OmegaConf.to_container(hydras)
    return {name: (plain["runtime"]["choices"][f"hydra/{name}"], plain[name]) for name in ("launcher", "sweeper")}


def _applied(overrides: list[str]) -> tuple[DictConfig, list[str], list[Problem]]:
    """Return the configuration with the overrides applied, the keys of its files, and the problems of failed overrides."""
    choices, values, problems = sort_overrides(overrides)
    try:
        config = _compose(choices)
        if options("resources") and "resources" in chosen_by_default() and config.launch.kind != "slurm":
            config = _compose([*choices, "~resources"])
    except Exception as error:  # Hydra, OmegaConf and PyYAML may raise almost any error for a faulty file
        blamed = [choice for choice in choices if _composes([other for other in choices if other != choice])]
        return OmegaConf.create(), [], [*problems, Problem(" ".join(blamed or choices) or "conf", one_line(error))]
    OmegaConf.set_struct(config, False)
    written: Any = OmegaConf.to_container(config)
    known = list(flat(written))
    for name in _own_sections(config):
        OmegaConf.update(config, f"extra.{name}", f"${{{name}}}", force_add=True)
    empty_replaced(config, values)
    for override in values:
        key = key_of(override)
        group = key.split(".")[0]
        is_new = group in own_groups() and not any(is_below(name, [key]) for name in known)
        if is_new and (group not in config or override.type == OverrideType.CHANGE):
            expected = f"+{key} is a new one" if group in config else f"+{group}=OPTION chooses one"
            problems.append(Problem(key, "unknown key", did_you_mean(key, known) or expected))
        else:
            problems += apply(config, override)
    if "${hydra:" in str(OmegaConf.to_container(config)):  # as in ${hydra:runtime.choices.parallel}
        HydraConfig.instance().set_config(_compose(choices, with_hydra=True))
    return config, known, problems + _name_values(config, known, given=[key_of(override) for override in values])


def _name_values(config: DictConfig, known: list[str], *, given: list[str]) -> list[Problem]:
    """Replace each value that is the name of a file in `conf/SECTION.KEY/` by this file's keys of the section.

    The file is for the target in its `_for_`. A key that the command line sets too keeps its value where the file has null.
    """
    problems = []
    for key in named_keys():
        section, _, last = key.rpartition(".")
        node = OmegaConf.select(config, section)
        if not isinstance(node, DictConfig) or last not in node:
            continue
        name = str(shown(OmegaConf.select(config, key, throw_on_resolution_failure=False))).strip("'")
        if name not in value_names(key, node):
            continue
        del node[last]
        content = {other: value for other, value in option_node(key, name).items() if other not in ("_for_", "_needs_")}
        known += [f"{section}.{other}" for other in content]
        for other, value in content.items():
            if not any(is_below(one, [f"{section}.{other}"]) for one in given if one != key):
                OmegaConf.update(config, f"{section}.{other}", value, merge=False, force_add=True)
            elif value is not None:
                problems.append(Problem(key, f"{name} sets {section}.{other}, and so does the command line", "one of them"))
    return problems


def _composes(choices: list[str]) -> bool:
    try:
        _compose(choices)
    except Exception:
        return False
    return True


def _compose(choices: list[str], *, with_hydra: bool = False) -> DictConfig:
    return copy.deepcopy(_composed(tuple(folders()), config_name(), tuple(choices), with_hydra))


@cache  # it takes 0.1 s, and most jobs of a sweep have the same choices
def _composed(_: tuple[Path, ...], name: str, choices: tuple[str, ...], with_hydra: bool) -> DictConfig:
    prepare_hydra()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return hydra_compose(name, overrides=list(choices), return_hydra_config=with_hydra)


def _own_sections(config: Mapping[str, Any] | DictConfig) -> list[str]:
    return [name for name in own_groups() if name in config and name not in RunConfig.model_fields]


def _without_own_groups(plain: dict[str, Any]) -> dict[str, Any]:
    own = _own_sections(plain)
    return {name: value for name, value in plain.items() if name not in own}


# --- from OmegaConf to plain data


def _resolve(config: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """Return `config` as plain data, with null for each value that cannot be resolved."""
    problems: list[Problem] = []
    written: Any = OmegaConf.to_container(config)
    for key in [key for key, value in flat(written).items() if value == "???"]:
        problems.append(Problem(key, "??? is not valid", "a value"))
        OmegaConf.update(config, key, None)
    while True:
        try:
            return OmegaConf.to_container(config, resolve=True), problems  # type: ignore[return-value]  # keys are strings
        except (OmegaConfBaseException, RecursionError) as error:
            key = getattr(error, "full_key", None) or "command line"
            is_new = all(problem.key != key for problem in problems)
            problems.append(Problem(key, "its interpolation does not resolve", one_line(error)))
            if key == "command line" or not is_new:
                return {}, problems
            OmegaConf.update(config, key, None)


def _changing(config: DictConfig, plain: dict[str, Any]) -> list[Problem]:
    """Return a problem for each key that names the run or its place, and has another value if the command starts later."""
    resolvers = set(_RESOLVER.findall(str(OmegaConf.to_container(config))))
    if all(name in ("run_id", "data", "hydra") or name.startswith("oc.") for name in resolvers):
        return []
    OmegaConf.clear_cache(config)
    OmegaConf.register_new_resolver("now", lambda pattern: (datetime.now() + _LATER).strftime(pattern), replace=True)
    try:
        later = flat(_resolve(config)[0])
    finally:
        setup_globals()  # Hydra's own `now`
    execution = execution_keys(plain)
    changing = {key: value for key, value in flat(plain).items() if repr(value) != repr(later.get(key))
                and (key in ("name", "run.root", "run.dir", "run.mirror") or not is_below(key, execution))}  # fmt: skip
    what = "{}, and later another value: the same command would not find its run again"
    problems = [Problem(key, what.format(shown(value)), "a fixed value") for key, value in changing.items()]
    return [problem for problem in problems if problem.key != "run.dir"] or problems  # it contains the name and the id


_RESOLVER = re.compile(r"\$\{\s*([\w.]+)\s*:")  # in `${now:%Y}`
_LATER = timedelta(days=400, hours=13, minutes=1, seconds=1, microseconds=1)  # each part of a date and a time differs


def resolve_text(text: str) -> str:
    """Return a text with its interpolations resolved, as in `${oc.env:NAME}`. Raise ValueError if this fails."""
    try:
        return str(OmegaConf.create({"text": text})["text"])
    except OmegaConfBaseException as error:
        raise ValueError(one_line(error)) from None


# --- the output of Hydra


def print_by_hydra(flags: dict[str, str], overrides: list[str]) -> None:
    """Print the output of Hydra's flags: Hydra's own configuration, its help, or a shell's completion."""

    @hydra.main(config_path=str(CONF), config_name=config_name(), version_base="1.3")
    def run_job(config: object) -> None:
        raise AssertionError("these flags print, and run nothing")

    prepare_hydra()
    choices, values, _ = sort_overrides(overrides)
    # flags first, because argparse accepts no flags between overrides; every value is forced (`++key=value`), because the
    # preflight checks the keys, not Hydra
    forced = [_forced(override.input_line.lstrip("+")) for override in values if override.input_line]
    sys.argv[1:] = [*(word for flag in flags.items() for word in flag if word), *choices, *forced]
    with redirect_stdout(io.StringIO()) as printed:  # Hydra prints a traceback if the reader closes the pipe
        try:
            run_job()
        except SystemExit as end:  # --hydra-help exits
            if end.code:
                raise
    print(printed.getvalue(), end="")


def _forced(override: str) -> str:
    """Return an override that Hydra takes as a value, also where it would see a group: the folder of a key's named values."""
    key, _, value = override.partition("=")
    section, _, last = key.rpartition(".")
    return f"++{section}={{{last}:{value}}}" if key in named_keys() else f"++{override}"
