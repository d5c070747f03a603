"""The frozen configuration: the one file that all processes of a run share, and the hash by which they know it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from framework.config.renamed import renamed
from framework.config.schema import RunConfig
from framework.runtime.files import write_atomically


def digest_of(plain: Any) -> str:
    """Return the SHA-256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class FrozenConfig:
    """The frozen configuration on disk: all that the processes of a run share."""

    path: Path
    digest: str


def freeze(config: dict[str, Any], directory: Path, *, name: str = "config.yaml") -> FrozenConfig:
    """Write `config` with its hash to that file of `directory`, whole or not at all."""
    digest = digest_of(config)
    path = directory / name
    text = yaml.safe_dump(config, sort_keys=False) + f"hash: {digest}\n"
    write_atomically(path, text)
    return FrozenConfig(path=path, digest=digest)


def thaw(frozen: FrozenConfig) -> RunConfig:
    """Read a frozen configuration. ValueError if it is not the one that was frozen."""
    config = yaml.safe_load(frozen.path.read_text())
    stored = config.pop("hash", None)
    actual = digest_of(config)
    if not stored == actual == frozen.digest:
        raise ValueError(
            f"{frozen.path} has changed since this run was started (hash {actual[:12]}, frozen as "
            f"{frozen.digest[:12]}); start the command again"
        )
    return RunConfig.model_validate(config)


def recall(directory: Path) -> dict[str, Any]:
    """Read the configuration that is frozen in a run's directory. ValueError if there is none, or it has been changed."""
    path = directory / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{directory} is no run: there is no config.yaml")
    try:
        config = yaml.safe_load(path.read_text())
        is_whole = config.pop("hash") == digest_of(config)
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{path} is not as it was frozen: its hash is another")
    return renamed(config)


def frozen_run_id(directory: Path) -> str | None:
    """Return the id of the run whose directory this is, or None if no run has been frozen there."""
    try:
        return yaml.safe_load((directory / "config.yaml").read_text())["run"]["id"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError):
        return None
