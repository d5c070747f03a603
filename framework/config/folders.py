"""The folders with groups and options: the user's, the framework's, the extras'. Also: the folders of the user's modules."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from framework.runtime.environment import variables

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster than SafeLoader

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")  # the path of a component in a module
ROOT = Path(__file__).resolve().parents[2]  # the folder of the checkout or of the installation
PACKAGED = Path(__file__).resolve().parents[1] / "conf"  # the folder in an installation
CONF = (PACKAGED if PACKAGED.is_dir() else ROOT / "conf").resolve()
EXTRAS = ROOT / "extras"  # beside the package `framework`, in a checkout and in an installation
_OURS = [CONF, *sorted(EXTRAS.glob("*/conf"))]


def own_folder() -> Path | None:
    """Return the user's folder: `--config-dir` or STEADFAST_CONF, else `./conf`, unless this is the framework's folder."""
    named = variables().get("STEADFAST_CONF")
    folder = Path(named or "conf").resolve()
    return folder if folder.is_dir() and folder != CONF else None


def config_name() -> str:
    """Return the name of the primary configuration: the value of `--config-name`, or `config`."""
    return variables().get("STEADFAST_CONFIG") or "config"


def folders() -> list[Path]:
    """Return the configuration folders in search order."""
    own = own_folder()
    return _OURS if own is None else [own, *_OURS]


def groups(within: Sequence[Path] | None = None) -> list[str]:
    """Return the names of the groups in some folders; or in all folders and in Hydra's ConfigStore."""
    names = [name for conf in within or folders() for name in subfolders(conf)]
    names += [name for name, node in _stored().items() if isinstance(node, dict)] if within is None else []
    return sorted({name for name in names if "." not in name and name[0] != "_" and name not in ("hydra", "launchers")})


def named_keys() -> list[str]:
    """Return the keys with values that have a file: the folder `conf/parallel.hook` has the values of `parallel.hook`."""
    return sorted({name for conf in folders() for name in subfolders(conf) if "." in name.strip(".")})


@cache  # called for every override of every job of a sweep
def subfolders(conf: Path) -> list[str]:
    """Return the names of the folders in a configuration folder."""
    return [path.name for path in conf.iterdir() if path.is_dir()]


def own_groups() -> list[str]:
    """Return the groups that exist only in the user's folder."""
    return sorted(set(groups()) - set(groups(_OURS)))


def options(group: str) -> list[str]:
    """Return the names of a group's options. An option in a subfolder has a name such as `vision/tiny`."""
    found = [path.relative_to(conf / group) for conf in folders() for path in (conf / group).rglob("*.yaml")]
    return sorted({path.with_suffix("").as_posix() for path in found} | stored_options(group).keys())


def value_names(key: str, node: Mapping[str, Any]) -> list[str]:
    """Return the names of a key's values that have a file for this node: for its target, with the keys that it needs."""
    found = {name: option_node(key, name) for name in options(key)}
    return [name for name, file in found.items()
            if file.get("_for_") == node.get("_target_") and node.keys() >= {*file.get("_needs_", ())}]  # fmt: skip


def option_of(group: str, node: Mapping[str, Any]) -> str:
    """Return the name of the option that a node comes from: with its target, and with the most of its keys.

    Without such an option, the last part of the target's dotted path.
    """
    target, found = node.get("_target_"), {name: option_node(group, name) for name in options(group)}
    fitting = [name for name, file in found.items() if file.get("_target_") == target and file.keys() <= node.keys()]
    return max(fitting, key=lambda name: len(found[name]), default=str(target).rpartition(".")[2])


def is_group(name: str) -> bool:
    """Return whether there is a folder with options of this name. A group in a group has a name such as `model/encoder`."""
    return name.split("/")[0] in groups() and bool(options(name))


def option_file(group: str, option: str) -> Path:
    """Return the file of an option. If no file exists, return the framework's path for it."""
    paths = [conf / group / f"{option}.yaml" for conf in folders()]
    return next((path for path in paths if path.is_file()), CONF / group / f"{option}.yaml")


def option_node(group: str, option: str) -> dict[str, Any]:
    """Return the content of an option's file, interpolations unresolved. Return {} for a faulty file: composing reports it."""
    content = _content(option_file(group, option)) or stored_options(group).get(option, {})
    of_all = group in content and "_target_" not in content  # a file for other sections too (`# @package _global_`)
    return content[group] if of_all and isinstance(content[group], dict) else content


def sets(path: Path, key: str) -> bool:
    """Return whether a file in the user's folder contains this key: of its group, or of the whole configuration."""
    content, names, folder = _content(path), key.partition("[")[0].split("."), own_folder()
    group = path.parent.relative_to(folder).parts if folder is not None else ()
    return _leads(content, names) or (tuple(names[: len(group)]) == group and _leads(content, names[len(group) :]))


def _leads(content: Any, names: Sequence[str]) -> bool:
    """Return whether these names, one in the other, lead to something."""
    for name in names:
        if not isinstance(content, dict) or name not in content:
            return False
        content = content[name]
    return True


def parse_yaml(text: str | bytes) -> Any:
    """Return the plain values in a YAML text. Raise yaml.YAMLError or ValueError if the text is not valid."""
    return _LOADER(text).get_single_data()


def _content(path: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


@cache  # called for every override of every job of a sweep
def defaults_in(path: Path) -> dict[str, str]:
    """Return the defaults of a primary configuration: options by group. An entry without a group has the option ""."""
    entries = _content(path).get("defaults")
    listed = entries if isinstance(entries, list) else []
    chosen = [pair for entry in listed for pair in (entry.items() if isinstance(entry, dict) else [(entry, "")])]
    return {str(group).split()[-1].lstrip("/"): str(option) for group, option in chosen}


def project_folders() -> list[Path]:
    """Return the folders of the user's modules: the working directory, and the parent of the user's configuration folder.

    In a Slurm job with a snapshot of the code, return the snapshot.
    """
    if (snapshot := variables().get("STEADFAST_SNAPSHOT")) is not None:
        return [Path(snapshot)]
    own = own_folder()
    return list(dict.fromkeys([Path.cwd(), *([] if own is None else [own.parent])]))


def enter_project() -> None:
    """Make the user's modules importable."""
    for folder in reversed(project_folders()):  # each folder goes to the front of the path
        if str(folder) not in sys.path and os.path.isdir(folder):
            sys.path.insert(0, str(folder))


# --- Hydra's ConfigStore


def _stored() -> Any:
    """Return the nodes in the store. Before Hydra is imported, nobody has stored any."""
    module = sys.modules.get("hydra.core.config_store")
    return {} if module is None else module.ConfigStore.instance().repo


def stored_options(group: str) -> dict[str, Any]:
    """Return a group's options as plain data, by name."""
    node = _stored()
    for part in group.split("/"):
        node = node.get(part, {}) if isinstance(node, dict) else {}
    entries = node.items() if isinstance(node, dict) else ()
    leaves = {name.removesuffix(".yaml"): entry.node for name, entry in entries if not isinstance(entry, dict)}
    if not leaves:
        return {}
    from omegaconf import OmegaConf  # imported late: --help needs none

    return {name: OmegaConf.to_container(leaf, throw_on_missing=False) for name, leaf in leaves.items()}
