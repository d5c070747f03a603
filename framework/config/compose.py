"""The composition of the configuration: from a command line to plain, resolved data."""

import os
import re
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import OverrideType
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.config.code import find_module
from framework.config.folders import defaults_in, groups, named_keys, option_node, options, own_groups, subfolders, value_names
from framework.config.hydra_compose import (
    compose_files,
    composed_files,
    composes,
    own_files,
    own_keys,
    prepare_hydra,
    without_own_groups,
)
from framework.config.identity import execution_keys, flat, identity, is_below
from framework.config.modes import MODES, Mode
from framework.config.overrides import apply, chosen_by_default, empty_replaced, key_of, one_line, parse, sort_overrides
from framework.config.schema import COMPONENTS, SEVERAL, RunConfig
from framework.config.spelling import did_you_mean, done_here
from framework.runtime.problem import Problem, shown


class Composed(NamedTuple):
    """The composed configuration. If there are problems, `config` may be empty; it only serves to find more problems."""

    config: dict[str, Any]
    problems: list[Problem]
    known: list[str]  # the keys of the chosen files
    given: list[str]  # the keys and groups that the command line names
    files: list[Path] = []  # of the user: the one whose values count comes first

    @property
    def mode(self) -> Mode | None:
        return MODES.get(str(self.config.get("mode")))


def forget_files() -> None:
    """Read the files again for the next composition: a program that lives on may have edited them."""
    composed_files.cache_clear()
    defaults_in.cache_clear()
    subfolders.cache_clear()
    find_module.cache_clear()


def compose_line(overrides: list[str]) -> Composed:
    """Compose the configuration from the folders and the command line's overrides, and resolve it to plain data.

    An override that cannot be applied becomes a `Problem` and is left out. So one report names all problems; Hydra would stop
    at the first.
    """
    config, known, problems = _applied(overrides)
    written: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]  # keys are strings
    with suppress(OmegaConfBaseException, RecursionError):  # what does not resolve is found below
        if (run_id := OmegaConf.select(config, "run.id")) is not None:
            OmegaConf.update(config, "run.id", run_id)  # run.dir has it too: it is computed once
    plain, unresolved = _resolve(config, written)
    for group in ("sampler", *SEVERAL):
        plain.setdefault(group, {})
    problems += unresolved + _unbuilt(written)
    plain = without_own_groups(plain)
    problems += _changing(config, written, plain)
    if not unresolved and isinstance(plain.get("run"), dict) and plain["run"].get("id") != identity(plain):
        what = "cannot be set: it is a hash of the keys that decide the result"
        problems.append(Problem("run.id", what, "set name or run.dir"))
    for key, value in flat(plain).items():
        if "${data:" in str(value) and not is_below(key, (*COMPONENTS, *SEVERAL, "extra")):
            problems.append(Problem(key, f"{value} is not valid", "facts of the data are for components"))
    if plain.get("draft") is True and isinstance(plain.get("run"), dict):
        plain = _as_draft(plain)
    given = [override.key_or_group for override in map(parse, overrides) if override is not None]
    return Composed(plain, problems, known, given, own_files() if config else [])


def _as_draft(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a draft: it is not rehearsed, and it begins anew in the folder of all drafts."""
    own = {"dir": f"{plain['run'].get('root')}/draft", "resume": "never", "code": "accept", "data": "accept", "mirror": None}
    return plain | {"rehearse": False, "run": plain["run"] | own}


def as_yaml(overrides: list[str], *, resolve: bool) -> str:
    """Return the configuration of a command line in the format of `--cfg job`."""
    config, _, _ = _applied(overrides)
    return OmegaConf.to_yaml(config, resolve=resolve)


def with_hydra(overrides: list[str]) -> DictConfig:
    """Return the configuration as Hydra gives it to callbacks: with Hydra's own node, and interpolations unresolved.

    Return an empty one if the files cannot be composed.
    """
    config, _, _ = _applied(overrides)
    if config:
        settings: Any = HydraConfig.instance().cfg
        config["hydra"] = settings.hydra
        with suppress(OmegaConfBaseException):
            config.hydra.runtime.output_dir = os.path.abspath(config.run.dir)
    return config


def _applied(overrides: list[str]) -> tuple[DictConfig, list[str], list[Problem]]:
    """Return the configuration with the overrides applied, the keys of its files, and the problems of failed overrides."""
    prepare_hydra()  # Hydra imports plug-ins, which may store options
    choices, values, problems = sort_overrides(overrides)
    try:
        files = compose_files(choices)
        if options("resources") and "resources" in chosen_by_default() and files.config.launch.kind != "slurm":
            files = compose_files([*choices, "~resources"])
    except Exception as error:  # Hydra, OmegaConf and PyYAML may raise almost any error for a faulty file
        blamed = [choice for choice in choices if composes([other for other in choices if other != choice])]
        missed = re.search(r"Could not override '([\w/]+)'|$", str(error))[1] or ""  # type: ignore[index]  # another program's group
        expected = did_you_mean(missed, [group for group in groups() if group != missed]) or done_here(missed) if missed else ""
        return OmegaConf.create(), [], [*problems, Problem(" ".join(blamed or choices) or "conf", one_line(error), expected)]
    hydra: Any = HydraConfig.instance()
    hydra.cfg = files.settings  # its method `set_config` copies them, also for each job of a sweep
    prepare_hydra()  # also after Hydra has registered its own resolvers
    config, problems = files.config, [*problems, *files.problems]
    written: Any = OmegaConf.to_container(config)
    known = list(flat(written))
    packages = [str(key).partition("@")[2].split(".")[0] for key in files.settings.hydra.runtime.choices]  # of `group@package`
    for name in (name for name in [*own_groups(), *packages] if name in config and name not in RunConfig.model_fields):
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
    for name in set(own_keys(config)) - {*RunConfig.model_fields, *config}:
        OmegaConf.update(config, name, f"${{extra.{name}}}", force_add=True)  # so that ${name} is found, as it was given
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


# --- from OmegaConf to plain data


def _resolve(config: DictConfig, written: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return `config` as plain data, with null for each value that cannot be resolved. `written`: with interpolations."""
    problems: list[Problem] = []
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


def _unbuilt(written: dict[str, Any]) -> list[Problem]:
    """Refuse a group of the user with a `_target_` to which no other key refers: nothing would build it."""
    problems = []
    for name in sorted({*own_groups()} - {*RunConfig.model_fields}):
        if "_target_" not in str(written.get(name)):
            continue
        others = {key: value for key, value in flat(written).items() if not is_below(key, (name, f"extra.{name}"))}
        if not re.search(rf"\$\{{(extra\.)?{re.escape(name)}\b", str(others)):
            what = "this group of yours has a _target_, but no key refers to it, so nothing would build it"
            problems.append(Problem(name, what, done_here(name) or f"${{{name}}} where it is used"))
    return problems


def _changing(config: DictConfig, written: dict[str, Any], plain: dict[str, Any]) -> list[Problem]:
    """Return a problem for each key that names the run or its place, and has another value if the command starts later."""
    resolvers = set(_RESOLVER.findall(str(written)))
    if all(name in ("run_id", "data", "hydra") or name.startswith("oc.") for name in resolvers):
        return []
    OmegaConf.clear_cache(config)
    OmegaConf.register_new_resolver("now", lambda pattern: (datetime.now() + _LATER).strftime(pattern), replace=True)
    try:
        later = flat(_resolve(config, written)[0])
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
