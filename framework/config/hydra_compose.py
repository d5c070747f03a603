"""The composition of files by Hydra: the folders that it searches, the resolvers, and its own output."""

import copy
import io
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from framework.config.folders import CONF, EXTRAS, config_name, folders, named_keys, own_folder, own_groups
from framework.config.hydra_settings import setting_problems
from framework.config.identity import EXECUTION, identity
from framework.config.overrides import parse, sort_overrides
from framework.config.schema import RunConfig
from framework.runtime.problem import Problem

LAUNCHER = {"_target_": "framework.sweep.pools.Pool", "n_jobs": 1}  # Hydra's default launcher, `basic`, would use this process


class _Folders(SearchPathPlugin):
    """A plugin that makes Hydra search all folders: the user's before the framework's, and the extras' after it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if (own := own_folder()) is not None:
            search_path.prepend("own", f"file://{own}", anchor="main")
        for folder in (folder for folder in folders() if folder.is_relative_to(EXTRAS)):
            search_path.append("extras", f"file://{folder}")


class ChosenFiles(NamedTuple):
    """The configuration of the chosen options. The jobs of a sweep share Hydra's settings, which are read-only."""

    config: DictConfig
    settings: DictConfig  # Hydra's own node, below `hydra`
    problems: list[Problem]  # of the settings


def compose_files(choices: list[str]) -> ChosenFiles:
    """Return the configuration of the chosen options, to be changed. Overrides of values are not among `choices`."""
    files = composed_files(tuple(folders()), config_name(), tuple(choices))
    return files._replace(config=copy.deepcopy(files.config))


@cache  # it takes 0.1 s, and most jobs of a sweep have the same choices
def composed_files(_: tuple[Path, ...], name: str, choices: tuple[str, ...]) -> ChosenFiles:
    prepare_hydra()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3", job_name="train"):
        config = compose(name, overrides=list(choices), return_hydra_config=True)
    settings = OmegaConf.masked_copy(config, "hydra")
    OmegaConf.set_readonly(settings, True)
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    return ChosenFiles(own, settings, setting_problems(settings.hydra))


def composes(choices: list[str]) -> bool:
    """Return whether Hydra can compose these choices."""
    try:
        compose_files(choices)
    except Exception:
        return False
    return True


def is_multirun(overrides: list[str]) -> bool:
    """Return whether `hydra.mode=MULTIRUN` makes the line a sweep: on the line itself, or in a chosen file."""
    given = [override.value() for override in map(parse, overrides) if override and override.key_or_group == "hydra.mode"]
    if given:
        return str(given[-1]) == "MULTIRUN"
    settings = hydra_node(overrides)
    return settings is not None and settings.mode == RunMode.MULTIRUN


def hydra_node(overrides: list[str]) -> DictConfig | None:
    """Return Hydra's own node of a line, read-only. None for a faulty file: the composition of the run reports it."""
    try:
        files = composed_files(tuple(folders()), config_name(), tuple(sort_overrides(overrides)[0]))
        return files.settings.hydra  # type: ignore[no-any-return]
    except Exception:
        return None


def own_files() -> list[Path]:
    """Return the files of the user's folder that the last composition has chosen, each before those that it overrides."""
    settings: Any = HydraConfig.instance().cfg
    folder, choices = own_folder(), settings.hydra.runtime.choices
    names = [*(f"{str(group).partition('@')[0]}/{choice}" for group, choice in choices.items()), config_name()]
    paths = [folder / f"{name}.yaml" for name in names] if folder is not None else []
    return [path for path in paths if path.is_file()]


# --- resolvers


def prepare_hydra() -> None:
    """Register the folders and the launcher of sweeps with Hydra, and three resolvers with OmegaConf.

    The resolvers are `${run_id:}`, `${data:FACT}` and `${hydra:KEY}`.
    """
    Plugins.instance().register(_Folders)
    ConfigStore.instance().store(group="hydra/launcher", name="basic", node=LAUNCHER)  # in place of Hydra's
    OmegaConf.register_new_resolver("hydra", _of_hydra, replace=True)
    OmegaConf.register_new_resolver("run_id", _run_id, replace=True)
    OmegaConf.register_new_resolver("data", lambda fact: f"${{data:{fact}}}", replace=True)  # the dataset resolves it later


def _of_hydra(path: str, *, _root_: DictConfig) -> Any:
    if path == "runtime.output_dir":  # Hydra's directory for the files of a job
        return OmegaConf.select(_root_, "run.dir")
    settings: Any = HydraConfig.instance().cfg
    return OmegaConf.select(settings, f"hydra.{path}", throw_on_missing=True)


def _run_id(_root_: DictConfig) -> str:
    # the identity excludes the sections that refer to the id
    plain: dict[str, Any] = {
        str(key): OmegaConf.to_container(_root_[key], resolve=True) if OmegaConf.is_config(_root_[key]) else _root_[key]
        for key in _root_
        if key not in EXECUTION
    }
    return identity(without_own_groups(plain))


def own_keys(config: Mapping[str, Any] | DictConfig) -> list[str]:
    """Return the names below `extra`."""
    return [str(name) for section in config if section == "extra" for name in config[section] or ()]


def without_own_groups(plain: dict[str, Any]) -> dict[str, Any]:
    own = {*own_groups(), *own_keys(plain)} - RunConfig.model_fields.keys()
    return {name: value for name, value in plain.items() if name not in own}


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
