"""The keys in which runs with the same name differ, because of a sweep or of different commands."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import yaml

from framework.config.folders import parse_yaml
from framework.config.identity import is_below
from framework.runs.settings import TextByKey, differing, execution_of, settings_of, with_options


def differences(paths: Iterable[Path]) -> dict[Path, str]:
    """Return for each run the values of the keys in which it differs from runs in the same folder: `KEY=VALUE KEY=VALUE`.

    If the options of a group differ, only the options are named, not their keys.
    """
    beside = defaultdict[Path, dict[Path, TextByKey]](dict)
    for path in paths:
        beside[path.parent][path] = _values(path / "config.yaml")
    found = dict[Path, str]()
    for runs in beside.values():
        configs = with_options([*runs.values()])
        differ = differing(configs)
        named = [key for key in differ if not is_below(key.rpartition(".")[0], differ)]
        for path, values in zip(runs, configs):
            found[path] = " ".join(f"{key}={values[key]}" for key in named if key in values)
    return found


def _values(path: Path) -> TextByKey:
    try:
        values = settings_of(parse_yaml(path.read_bytes()))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):  # the file is missing or damaged
        return {}
    hidden = execution_of(values)
    return {key: _as_word(text) for key, text in values.items() if not is_below(key, (*hidden, "hash"))}


def _as_word(text: str) -> str:
    """Return a value with quotation marks if, without them, its spaces would look like the end of the value."""
    return repr(text) if len(text.split()) > 1 and text[0] not in "['\"" else text
