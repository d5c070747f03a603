"""The frozen configuration: one file that all processes of a run share, and the hash of the file's content."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from framework.config.folders import parse_yaml
from framework.runtime.files import write_atomically

if TYPE_CHECKING:
    from framework.config.schema import RunConfig


def digest_of(plain: Any) -> str:
    """Return the SHA-256 of plain data. The order of the keys does not matter; keys of different types differ."""
    return hashlib.sha256(json.dumps(_with_text_keys(plain), sort_keys=True).encode()).hexdigest()


def _with_text_keys(plain: Any) -> Any:
    """Return plain data with each key as its JSON: so 0 and "0" differ, and keys of several types can be sorted."""
    if isinstance(plain, dict):
        return {json.dumps(key): _with_text_keys(value) for key, value in plain.items()}
    return [_with_text_keys(value) for value in plain] if isinstance(plain, (list, tuple)) else plain


@dataclass(frozen=True)
class FrozenConfig:
    """What the processes of a run share: its configuration, and the claim (framework/runtime/lock.py) with which they write."""

    path: Path
    digest: str
    token: str = ""


def freeze(config: dict[str, Any], directory: Path, *, name: str = "config.yaml") -> FrozenConfig:
    """Write `config` and its hash to the file `name` in `directory`, atomically."""
    frozen = FrozenConfig(directory / name, digest_of(config))
    write_atomically(frozen.path, yaml.safe_dump(config, sort_keys=False) + f"hash: {frozen.digest}\n")
    return frozen


def thaw(frozen: FrozenConfig) -> "RunConfig":
    """Read a frozen configuration. Raise ValueError if the file has changed."""
    from framework.config.schema import RunConfig  # imported late, with pydantic: a hash needs neither

    config = _read(frozen.path)
    if digest_of(config) != frozen.digest:
        raise ValueError(f"{frozen.path} has changed since this run was started; start the command again")
    return RunConfig.model_validate(config)


def recall(directory: Path) -> dict[str, Any]:
    """Read the frozen configuration in a run's directory. Raise ValueError if it does not exist or has been changed."""
    path = directory / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{directory} is not a run: there is no config.yaml")
    if (config := _read(path)) is None:
        raise ValueError(f"{path} has changed since the run wrote it: its hash differs")
    return config


def _read(path: Path) -> dict[str, Any] | None:
    """Return the configuration in a file, or None if its hash is wrong or the file cannot be read."""
    try:
        config = parse_yaml(path.read_text())
        return config if config.pop("hash") == digest_of(config) else None
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError, RecursionError):
        return None
