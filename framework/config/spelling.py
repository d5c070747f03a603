"""The key or option that the user probably meant by a misspelt word."""

import difflib
import functools
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
    """Return the choice that the user probably meant by `word`, or None."""
    word = word.lower().replace("-", "_")
    section, _, last = word.rpartition(".")
    lasts = [choice.rpartition(".")[2] for choice in choices]
    siblings = [choice for choice in choices if choice.rpartition(".")[0] == section]
    if word in choices:
        return word
    if last in lasts and last not in _VAGUE:  # the correct word in the wrong section, or without its section
        return choices[lasts.index(last)]
    for choice, names in _words("keys").items():
        if last in names.split() and choice in choices:
            return choice
    for candidates, cutoff in ((siblings, 0.7), (choices, 0.75)):
        for close in difflib.get_close_matches(word, candidates, n=1, cutoff=cutoff):
            # the last words must be similar too; a shared section is not enough
            if difflib.SequenceMatcher(None, last, close.rpartition(".")[2]).ratio() >= (0.7 if section else 0.6):
                return close
        if last in _VAGUE:
            return None
    if near := difflib.get_close_matches(last, lasts, n=1, cutoff=0.8 if section else 0.6):
        return choices[lasts.index(near[0])]
    alike = (choice for choice, names in _words("keys").items() if section and choice in siblings
             and difflib.get_close_matches(last, names.split(), n=1, cutoff=0.8))  # fmt: skip
    return next(alike, None)
