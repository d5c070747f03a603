"""Where a run comes from: its starts, and the runs whose checkpoints and weights its configuration names."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.frozen_file import recall
from framework.config.identity import flat
from framework.runs.directory import RunDirectory
from framework.runs.provenance import Provenance

_OWN_PLACE = ("run.id", "run.dir", "run.root", "run.mirror")


@dataclass(frozen=True)
class Parent:
    """A file or folder that a run's configuration names and that another run has written."""

    key: str  # of the configuration
    path: Path
    run: Path


@dataclass(frozen=True)
class Ancestor:
    """A run, and what it took from others."""

    run: Path
    starts: list[dict[str, Any]]  # of provenance.json
    parents: list[Parent]


def lineage(run: Path) -> list[Ancestor]:
    """Return a run and all runs that it comes from, each before those that took something from it."""
    found: dict[Path, Ancestor] = {}
    _visit(run, found)
    return list(found.values())


def _visit(run: Path, found: dict[Path, Ancestor], on_the_way: frozenset[Path] = frozenset()) -> None:
    place = run.resolve()
    starts = Provenance(run).read()["starts"]
    parents = [parent for parent in _parents(run, starts) if parent.run.resolve() not in on_the_way | {place}]
    for parent in parents:
        if parent.run.resolve() not in found:
            _visit(parent.run, found, on_the_way | {place})
    found[place] = Ancestor(run, starts, parents)


def _parents(run: Path, starts: list[dict[str, Any]]) -> Iterator[Parent]:
    try:
        values = flat(recall(run))
    except ValueError:
        return
    begun_in = str(starts[0].get("directory", "")) if starts else ""  # relative paths are from there
    for key, value in values.items():
        for text in _texts(value) if key not in _OWN_PLACE else ():
            path = Path(begun_in, os.path.expanduser(text))
            if os.sep in text and path.exists() and (owner := _owner(path)) is not None:
                yield Parent(key, path, owner)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _owner(path: Path) -> Path | None:
    """Return the run in whose directory a path is."""
    for folder in (path, *path.parents):
        directory = RunDirectory(folder)
        if (folder / "config.yaml").is_file() and (directory.summary.is_file() or directory.checkpoints.is_dir()):
            return folder
    return None
