"""Composing, identifying and freezing the configuration: from a command line to the one file that every process reads."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.files import write_atomically
from framework.schema import Problem, did_you_mean, known_keys

CONF = Path(__file__).resolve().parent.parent / "conf"

# What decides how or where a run is executed, but not what it computes: not part of its identity.
EXECUTION = (
    "launch", "logger", "backend", "run", "mode", "hydra", "name",
    "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_best", "checkpoint.async_save", "dataset.num_workers",
)  # fmt: skip


def identity(config: dict[str, Any]) -> str:
    """Return the run's id: 12 hexadecimal digits that hash everything that decides what is computed."""
    kept = {key: value for key, value in _flat(config).items() if not _is_execution(key)}
    return _digest(kept)[:12]


def _is_execution(key: str) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in EXECUTION)


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            # lr=1 and lr=1.0 are the same command
            flat[prefix + key] = int(value) if isinstance(value, float) and value.is_integer() else value
    return flat


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _resolve_run_id(_root_: DictConfig) -> str:
    # the branches that the identity leaves out are the ones that mention the id
    plain = {
        key: OmegaConf.to_container(_root_[key], resolve=True) if OmegaConf.is_config(_root_[key]) else _root_[key]
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
    groups, values, problems = _sort_overrides(overrides)
    try:
        config = _compose(groups)
    except HydraException as error:
        problems.append(Problem("command line", _one_line(error)))
        config = _compose([])
    OmegaConf.set_struct(config, False)
    known = known_keys(_plain(config, resolve=False))
    for override in values:
        problems += _apply(config, override, known=known)
    try:
        plain = _plain(config, resolve=True)
    except OmegaConfBaseException as error:
        problems.append(Problem(getattr(error, "full_key", None) or "command line", _one_line(error), "a value that resolves"))
        return {}, problems
    plain.setdefault("logger", {})
    return plain, problems


def _plain(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]  # the keys of our YAML are strings


def _compose(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return hydra_compose("config", overrides=overrides)


def _sort_overrides(overrides: list[str]) -> tuple[list[str], list[Override], list[Problem]]:
    """Split into the choices of group options (for Hydra), the values, and what is neither."""
    groups: list[str] = []
    values: list[Override] = []
    problems: list[Problem] = []
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            problems.append(Problem(text, "not understood", "key=value, or group=option; quote a value with special characters"))
            continue
        key = override.key_or_group
        if override.is_sweep_override():
            problems.append(Problem(key, "several values make a sweep", "add -m, or quote the value"))
        elif (CONF / key).is_dir() and override.type != OverrideType.DEL and not isinstance(override.value(), dict):
            missing = _missing_options(key, override.value())
            problems += missing
            groups += [] if missing else [text]
        else:
            values.append(override)
    return groups, values, problems


def options(group: str) -> list[str]:
    """Return the names of a group's options."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _missing_options(group: str, chosen: Any) -> list[Problem]:
    problems = []
    for name in chosen if isinstance(chosen, list) else [chosen]:
        if name is not None and not (CONF / group / f"{name}.yaml").is_file():
            close = did_you_mean(str(name), options(group))
            expected = "one of " + ", ".join(options(group)) + (f"; {close}" if close else "")
            problems.append(Problem(group, f"no option {name!r}", expected))
    return problems


def _apply(config: DictConfig, override: Override, *, known: list[str]) -> list[Problem]:
    key = override.key_or_group
    if override.type == OverrideType.DEL:
        return [Problem(key, "cannot be deleted", "every key of the schema is needed; null switches a feature off")]
    try:
        OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
    except (OmegaConfBaseException, AttributeError, TypeError, ValueError):
        return [Problem(key, "unknown key", did_you_mean(key, known) or "its parent holds a value, not keys")]
    return []


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split("\n    full_key:")[0].split())


@dataclass(frozen=True)
class Frozen:
    """The frozen configuration on disk: all that the processes of a run share."""

    path: Path
    digest: str


def freeze(config: dict[str, Any], directory: Path) -> Frozen:
    """Write `config` with its hash to `directory`/config.yaml, whole or not at all."""
    digest = _digest(config)
    path = directory / "config.yaml"
    text = yaml.safe_dump(config, sort_keys=False) + f"hash: {digest}\n"
    write_atomically(path, text)
    return Frozen(path=path, digest=digest)


def thaw(frozen: Frozen) -> dict[str, Any]:
    """Read a frozen configuration. ValueError if it is not the one that was frozen."""
    config = yaml.safe_load(frozen.path.read_text())
    stored = config.pop("hash", None)
    actual = _digest(config)
    if not stored == actual == frozen.digest:
        raise ValueError(f"{frozen.path} has changed since this run was started (hash {actual[:12]}, frozen as "
                         f"{frozen.digest[:12]}); start the command again")
    return config


def frozen_run_id(directory: Path) -> str | None:
    """Return the id of the run whose directory this is, or None if no run has been frozen there."""
    try:
        return yaml.safe_load((directory / "config.yaml").read_text())["run"]["id"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None


def force_values(arguments: list[str]) -> list[str]:
    """Return the arguments with every value override forced (`++key=value`): unknown keys are ours to report, all at once."""
    forced = []
    for argument in arguments:
        key = argument.partition("=")[0]
        is_value = "=" in argument and not argument.startswith(("-", "+", "~", "hydra")) and not (CONF / key).is_dir()
        forced.append(f"++{argument}" if is_value else argument)
    return forced
