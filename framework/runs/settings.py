"""A run's configuration as texts by dotted key. Runs are compared by their whole texts; only a printed text may be cut."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from framework.config.code import prefixes
from framework.config.folders import parse_yaml
from framework.config.identity import execution_keys, is_below, leaves

_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_MOST_KEYS = 2000  # per configuration: a file may have exponentially many, by aliases
_WIDEST = 1 << 20  # columns, before YAML continues in another line
_TARGET = "._target_"

TextByKey = dict[str, str]


def settings_of(config: dict[str, Any]) -> TextByKey:
    """Return the values of a configuration as texts by dotted key. A list is one value."""
    return {key: text_of(value) for key, value in islice(leaves(config), _MOST_KEYS)}


def text_of(value: Any) -> str:
    """Return a value in YAML's form, in which different values have different texts."""
    return _known_text(value) if value is None or isinstance(value, (str, int)) else _text(value)


def _text(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=_DUMPER, default_flow_style=True, width=_WIDEST, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


_known_text = lru_cache(maxsize=1 << 14, typed=True)(_text)  # thousands of runs have the same words


def with_options(configs: Sequence[TextByKey]) -> list[TextByKey]:
    """Return the settings with components by the key of their section: `model` instead of `model._target_`.

    The text is the last word of the component's path, or the whole path if another run has the same word of another path.
    """
    paths: dict[tuple[str, str], set[str]] = {}
    for config in configs:
        for key, path in config.items():
            if key.endswith(_TARGET):
                paths.setdefault((key, _last_word(path)), set()).add(path)

    def option(key: str, text: str) -> tuple[str, str]:
        if not key.endswith(_TARGET):
            return key, text
        word = _last_word(text)
        return key.removesuffix(_TARGET), word if len(paths[key, word]) == 1 else text

    return [dict(option(key, text) for key, text in config.items()) for config in configs]


def _last_word(path: str) -> str:
    return path.rpartition(".")[2]


def execution_of(*configs: dict[str, Any]) -> set[str]:
    """Return the keys, or sections, that are not part of the identity of any of these runs."""
    found = [({*execution_keys(config)}, [key for key, _ in islice(leaves(config), _MOST_KEYS)]) for config in configs]

    def is_execution(key: str) -> bool:
        return all(key in keys or not any(is_below(own, [key]) for own in owns) for keys, owns in found)

    return set(filter(is_execution, set[str]().union(*(keys for keys, _ in found))))


def differing(configs: Sequence[TextByKey]) -> list[str]:
    """Return the keys with different values in the configurations that have these keys."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({config[key] for config in configs if key in config}) > 1]


# --- the keys in which runs differ


def differences(paths: Iterable[Path]) -> dict[Path, str]:
    """Return for each run the values of the keys in which it differs from runs in the same folder: `KEY=VALUE KEY=VALUE`.

    If the options of a group differ, only the options are named, not their keys.
    """
    beside = defaultdict[Path, dict[Path, TextByKey]](dict)
    for path in paths:
        config = read_config(path) or {}
        hidden = execution_of(config) | {"hash"}
        values = {key: _as_word(text) for key, text in settings_of(config).items() if hidden.isdisjoint(prefixes(key))}
        beside[path.parent][path] = values
    found = dict[Path, str]()
    for runs in beside.values():
        configs = with_options([*runs.values()])
        differ = differing(configs)
        named = [key for key in differ if not is_below(key.rpartition(".")[0], differ)]
        for path, values in zip(runs, configs):
            found[path] = " ".join(f"{key}={values[key]}" for key in named if key in values)
    return found


def read_config(run: Path) -> dict[str, Any] | None:
    """Return the configuration in a run's directory, whose hash may be wrong. None: there is none, or it is damaged."""
    try:
        config = parse_yaml((run / "config.yaml").read_bytes())
        list(islice(leaves(config), _MOST_KEYS))  # a section may contain itself
    except (OSError, ValueError, yaml.YAMLError, RecursionError, AttributeError):
        return None
    return dict(config)


def _as_word(text: str) -> str:
    """Return a value with quotation marks if, without them, its spaces would look like the end of the value."""
    return repr(text) if len(text.split()) > 1 and text[0] not in "['\"" else text
