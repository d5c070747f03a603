"""The options that a program has put into Hydra's ConfigStore."""

from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf


def stored_groups() -> list[str]:
    """Return the names of the groups, also of Hydra's own."""
    return [name for name, node in ConfigStore.instance().repo.items() if isinstance(node, dict)]


def stored_options(group: str) -> dict[str, Any]:
    """Return a group's options as plain data, by name."""
    node: Any = ConfigStore.instance().repo
    for part in group.split("/"):
        node = node.get(part, {}) if isinstance(node, dict) else {}
    entries = node.items() if isinstance(node, dict) else ()
    return {name.removesuffix(".yaml"): OmegaConf.to_container(entry.node, throw_on_missing=False)
            for name, entry in entries if isinstance(entry, ConfigNode)}  # fmt: skip
