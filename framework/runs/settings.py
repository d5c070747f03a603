"""A run's configuration as texts by dotted key. Runs are compared by their whole texts; only a printed text may be cut."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from framework.config.folders import parse_yaml
from framework.config.identity import execution_keys, is_below
from framework.runtime.problem import shown

_MOST_KEYS = 2000  # per configuration
_MOST_PIECES = 100_000  # per configuration; a list has a piece for each of its values
_TARGET = "._target_"

TextByKey = dict[str, str]


def settings_of(config: Any) -> TextByKey:
    """Return the values of a configuration as texts in YAML's form. Different values have different texts. A list is one value.

    The values are read one by one, so that a file with exponentially many aliases does no harm.
    """
    found: dict[str, list[str]] = {}
    for key, piece in islice(_leaves(config, ""), _MOST_PIECES):
        found.setdefault(key, []).append(piece)
    return {key: "".join(found[key]) for key in islice(found, _MOST_KEYS)}


def text_of(value: Any) -> str:
    """Return one value as a whole text, as it is in the settings."""
    return "".join(islice(_pieces(value), _MOST_PIECES)) if isinstance(value, (dict, list, tuple)) else _plain(value)


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


def execution_of(*configs: TextByKey) -> set[str]:
    """Return the keys, or sections, that are not part of the identity of any of these runs."""
    found = [set(execution_keys(_sections(config))) for config in configs]

    def is_execution(key: str) -> bool:
        return all(key in keys or not any(is_below(own, [key]) for own in config) for keys, config in zip(found, configs))

    return set(filter(is_execution, set[str]().union(*found)))


def _sections(config: TextByKey) -> dict[str, Any]:
    """Return settings as nested data, with null for `null`; other values are texts."""
    sections: dict[str, Any] = {}
    for key, text in config.items():
        *path, last = key.split(".")
        node = sections
        for name in path:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                break
        else:
            node[last] = {"null": None, "{}": {}}.get(text, text)
    return sections


def differing(configs: Sequence[TextByKey]) -> list[str]:
    """Return the keys with different values in the configurations that have these keys."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({config[key] for config in configs if key in config}) > 1]


def parsed(value: Any) -> float | None:
    """Return the number in a text (a number stays the same), or None if it is not a number."""
    try:
        return float(value)
    except ValueError:
        return None


def _last_word(path: str) -> str:
    return path.rpartition(".")[2]


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in node.items() if isinstance(node, dict) else ():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{key}.")
        elif isinstance(value, (dict, list, tuple)):
            yield from ((key, piece) for piece in _pieces(value))
        else:
            yield key, _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, str):
        looks_like_another = value[:1] in "['\"" or value in ("null", "true", "false", "{}") or parsed(value) is not None
        return repr(value) if looks_like_another else value
    return _exact(value)


def _pieces(value: Any) -> Iterator[str]:
    """Yield the text of a value in pieces. A text has quotation marks, so that a comma in it does not look like two items."""
    if not isinstance(value, (dict, list, tuple)):
        yield _exact(value)
        return
    begin, end = "{}" if isinstance(value, dict) else "[]"
    names = [f"{name}: " for name in value] if isinstance(value, dict) else [""] * len(value)
    yield begin
    for number, (name, item) in enumerate(zip(names, value.values() if isinstance(value, dict) else value)):
        yield ", " * (number > 0) + name
        yield from _pieces(item)
    yield end


def _exact(value: Any) -> str:
    return shown(value) if value is None or isinstance(value, (bool, int)) else repr(value)


# --- the keys in which runs differ


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
