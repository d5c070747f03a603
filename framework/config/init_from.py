"""`model.init_from`: the files with the initial weights of a run, and the conversion of their names to the model's names."""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from framework.config.section import Section
from framework.runtime.files import checksum
from framework.runtime.plain import Invalid, read_json
from framework.runtime.problem import Problem, shown

_INDEX = ".safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class InitFile(Section):
    """An entry of `model.init_from`: a safetensors file, an index of several files, or a folder with one of these.

    Each tensor name in the file is changed by `rename`: regular expressions with their `re.sub` replacements, in order. Then
    `prefix` is added in front. `transpose` are patterns (as in trainer.freeze) for the new names of matrices. `strict`: every
    tensor must fit the model.
    """

    file: str
    prefix: str = ""
    rename: dict[str, str] = {}
    transpose: list[str] = []
    strict: bool = False

    def rules(self) -> Iterator[Problem]:
        for pattern, replacement in self.rename.items():
            try:
                re.sub(pattern, replacement, "")  # re.sub parses the replacement even if the pattern does not match
            except (re.error, IndexError, RecursionError, OverflowError) as error:
                yield Problem(
                    "rename", f"{shown({pattern: replacement})}: {error}", "a regular expression, as of Python's re.sub"
                )

    def named(self, names: Iterable[str]) -> dict[str, str]:
        """Return the model's name for each name in the file. Raise Invalid for a pattern that matches no name."""
        changed = {name: name for name in names}
        for pattern, replacement in self.rename.items():
            if not any(re.search(pattern, name) for name in changed.values()):
                there = ", ".join(sorted(changed.values())[:8])
                raise Invalid(f"has no name that matches the pattern {pattern!r} of rename; it has {there}, ...")
            changed = {name: re.sub(pattern, replacement, now) for name, now in changed.items()}
        return {name: self.prefix + now for name, now in changed.items()}


def entries_of(init_from: Any) -> list[InitFile]:
    """Return the entries of a valid `model.init_from`."""
    items = init_from if isinstance(init_from, list) else [init_from]
    return [InitFile(file=item) if isinstance(item, str) else InitFile.model_validate(item) for item in items]


def files_of(path: Path) -> list[Path]:
    """Return the files that a path names: the file itself, or a folder's weights. For an index, return it before its files.

    This does not check that the files exist or what they contain. Raise Invalid for a folder without safetensors, or for an
    index that does not list files beside it.
    """
    if path.is_dir():
        path = _weights_in(path)
    if not path.name.endswith(_INDEX):
        return [path]
    return [path, *(path.with_name(name) for name in sorted(set(index_of(path).values())))]


def index_of(path: Path) -> dict[str, str]:
    """Return the file of each tensor, from an index in Hugging Face's format. Raise Invalid if the index is wrong."""
    _, index = read_json(path.resolve())
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise Invalid(f"{shown(path.name)} has no weight_map, which says in which file each tensor is")
    for file in places.values():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\0]+\.safetensors", file):
            raise Invalid(f"{shown(path.name)} names {shown(file)}, which is not a safetensors file beside it")
    return places


def _weights_in(folder: Path) -> Path:
    names = sorted(os.listdir(folder))
    found = [name for name in names if name == "model.safetensors"] or [name for name in names if name.endswith(_INDEX)]
    if len(found) == 1:
        return folder / found[0]
    if len(found) > 1:
        raise Invalid(f"has several of these: {', '.join(found)}; name one of them")
    pickled = [name for name in names if name.endswith(_PICKLED)]
    cure = f"; `steadfast convert {folder / pickled[0]}` makes a safetensors file" if pickled else ""
    raise Invalid(f"is a directory instead of a file, without a model.safetensors and a *{_INDEX}{cure}")


# --- the parts that count in a run's identity: the content of the files, and the changes of their names


def content_of(path: str) -> str | None:
    """Return the checksum of a file's content. Return None if the file cannot be read (the preflight reports this)."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return None
        return _content(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    except (OSError, ValueError):  # ValueError: the path has a null byte
        return None


@cache  # a sweep needs it once per job, and hashing gigabytes takes seconds
def _content(path: str, *_: int) -> str:
    return checksum(Path(path))[1]


def init_contents(init_from: Any) -> dict[str, str | None]:
    """Return the checksum of every file of a valid `model.init_from`."""
    return {str(path): content_of(str(path)) for entry in entries_of(init_from) for path in files_of(Path(entry.file))}


def init_identity(init_from: Any) -> Any:
    """Return the value of `model.init_from` for a run's identity. Return the value itself if the files cannot be read.

    (Then the preflight reports why.)
    """
    try:
        entries = [_identity(entry) for entry in entries_of(init_from)]
    except (Invalid, OSError, ValueError):
        return init_from
    return init_from if any(None in entry["content"] for entry in entries) else entries


def _identity(entry: InitFile) -> dict[str, Any]:
    content = [content_of(str(path)) for path in files_of(Path(entry.file))]
    options = entry.model_dump(exclude={"file"}, exclude_defaults=True)
    if "rename" in options:
        options["rename"] = [[pattern, replacement] for pattern, replacement in entry.rename.items()]  # their order matters
    return {"content": content, **options}
