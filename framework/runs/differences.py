"""The keys in which runs with the same name differ, because of a sweep or of different commands."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from framework.config.folders import parse_yaml
from framework.config.identity import EXECUTION, is_below
from framework.runtime.problem import shown

_MOST_KEYS = 2000  # per configuration
_NOT_SHOWN = (*EXECUTION, "hash")


def differences(paths: Iterable[Path]) -> dict[Path, str]:
    """Return for each run the values of the keys in which it differs from runs in the same folder: `KEY=VALUE KEY=VALUE`.

    If the options of a group differ, only the options are named, not their keys.
    """
    beside = defaultdict[Path, dict[Path, dict[str, str]]](dict)
    for path in paths:
        beside[path.parent][path] = _values(path / "config.yaml")
    found = dict[Path, str]()
    for runs in beside.values():
        keys = dict.fromkeys(key for values in runs.values() for key in values)
        differ = [key for key in keys if len({values[key] for values in runs.values() if key in values}) > 1]
        named = [key for key in differ if not is_below(key.rpartition(".")[0], differ)]
        found |= {path: " ".join(f"{key}={values[key]}" for key in named if key in values) for path, values in runs.items()}
    return found


def _values(path: Path) -> dict[str, str]:
    try:
        return dict(islice(_leaves(parse_yaml(path.read_bytes())), _MOST_KEYS))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):  # the file is missing or damaged
        return {}


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values one by one, so that a file with exponentially many aliases does no harm."""
    for name, value in node.items() if isinstance(node, dict) else ():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{key}.")
        elif name == "_target_":  # the chosen option
            yield prefix.rstrip("."), str(value).rpartition(".")[2]
        elif not is_below(key, _NOT_SHOWN):
            yield key, shown(int(value) if isinstance(value, float) and value.is_integer() else value)
