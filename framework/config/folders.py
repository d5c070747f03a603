"""Where configuration lies: the folders that are searched for groups and options, the user's own before ours."""

import os
import sys
from pathlib import Path
from typing import Any

import yaml

from framework.runtime.environment import variables
from framework.runtime.torchvision_fix import watch_for_torchvision

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, or of the installation
PACKAGED = Path(__file__).resolve().parents[1] / "conf"  # in an installation
CONF = PACKAGED if PACKAGED.is_dir() else ROOT / "conf"


def own_folder() -> Path | None:
    """Return the user's folder: `--config-dir` or STEADFAST_CONF, else `conf` in the working directory, if it is not ours."""
    named = variables().get("STEADFAST_CONF")
    folder = Path(named or "conf").resolve()
    return folder if folder.is_dir() and folder != CONF.resolve() else None


def config_name() -> str:
    """Return the name of the primary configuration: `--config-name`, else `config`."""
    return variables().get("STEADFAST_CONFIG") or "config"


def folders() -> list[Path]:
    """Return the folders of configuration, the first to be searched first."""
    own = own_folder()
    return [CONF] if own is None else [own, CONF]


def groups(folder: Path | None = None) -> list[str]:
    """Return the names of the configuration's groups, of all folders or of one."""
    found = folders() if folder is None else [folder]
    return sorted(
        {path.name for conf in found for path in conf.iterdir() if path.is_dir() and path.name[0] not in "._"} - {"hydra"}
    )


def own_groups() -> list[str]:
    """Return the groups that only the user's folder has."""
    own = own_folder()
    return [] if own is None else sorted(set(groups(own)) - set(groups(CONF)))


def options(group: str) -> list[str]:
    """Return the names of a group's options; of one in a folder below the group's, with that: `vision/tiny`."""
    found = {
        path.relative_to(conf / group).with_suffix("").as_posix()
        for conf in folders()
        for path in (conf / group).rglob("*.yaml")
    }
    return sorted(found)


def option_file(group: str, option: str) -> Path:
    """Return the file of an option. FileNotFoundError if there is none."""
    paths = [conf / group / f"{option}.yaml" for conf in folders()]
    return next((path for path in paths if path.is_file()), paths[-1])


def option_node(group: str, option: str) -> dict[str, Any]:
    """Return what an option's file says, unresolved."""
    return yaml.safe_load(option_file(group, option).read_text()) or {}


def enter_project() -> None:
    """Make the user's own modules importable: those of the working directory, and beside the user's configuration."""
    watch_for_torchvision()
    own = own_folder()
    for folder in (None if own is None else own.parent, Path.cwd()):
        if folder is not None and str(folder) not in sys.path and os.path.isdir(folder):
            sys.path.insert(0, str(folder))
