"""The key or option that the user probably meant by a misspelt word."""

import difflib
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def _words(kind: str) -> dict[str, Any]:
    """Return the names of our `keys` or `options` in other programs, or how to do here what their other keys do."""
    return yaml.safe_load(Path(__file__).with_name("words.yaml").read_text())[kind]


def done_here(key: str) -> str:
    """Return how to do here what a key does in other programs. Return an empty string if this is unknown."""
    words = key.lower().split(".")
    return next((text for names, text in _words("done_here").items() if set(names.split()) & {words[0], words[-1]}), "")


def option_meant(word: str, group: str, choices: Sequence[str]) -> str:
    """Return `did you mean OPTION?` for a word that is not an option of the group, or an empty string without a near option."""
    for option, names in _words("options").get(group, {}).items():
        if word.lower() in names.split():
            return f"did you mean {option}?"
    return did_you_mean(word, choices)


_VAGUE = ("root", "name", "mode", "monitor", "every", "id", "dir", "kind")  # these words have other meanings in other sections


def did_you_mean(word: str, choices: Sequence[str]) -> str:
    """Return `did you mean X?` with the nearest X of `choices`, or an empty string without a near choice."""
    meant = nearest(word, choices)
    return f"did you mean {meant}?" if meant else ""


def nearest(word: str, choices: Sequence[str]) -> str | None:
    """Return the choice that the user probably meant by `word`, or None.

    Only the last words are compared, also those that other programs use. In other sections than the word's, they must be equal.
    """
    word = word.lower().replace("-", "_")
    if word in choices:
        return word
    section, last = _split(word)
    meant: dict[str, str] = {}
    for choice in sorted(choices, key=lambda choice: _split(choice)[0] != section):
        of, own = _split(choice)
        names = [own.lower()] * (of == section or own not in _VAGUE) + str(_words("keys").get(choice, "")).split()
        for name in (name for name in names if of == section or not section or name == last):
            meant.setdefault(name, choice)
    close = difflib.get_close_matches(last, meant, n=1, cutoff=0.7)
    return meant[close[0]] if close else None


def _split(key: str) -> tuple[str, str]:
    parts = re.split(r"[./]", key)
    return ".".join(parts[:-1]), parts[-1]
