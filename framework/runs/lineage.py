"""The lineage of a run: its starts, and the other runs that have written the checkpoints and weights it has used."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.identity import flat
from framework.config.section import texts_in
from framework.runs.directory import RunDirectory
from framework.runs.provenance import Parent, Provenance, Start

_OWN_PLACE = ("run.id", "run.dir", "run.root", "run.mirror")


@dataclass(frozen=True)
class Ancestor:
    """A run, and what it has used from other runs."""

    run: Path
    starts: list[Start]  # from provenance.json
    parents: list[Parent]


def fate_of(parent: Parent) -> str:
    """Return what has happened to the run since. Empty if it is unchanged."""
    if not Path(parent.owner).is_dir():
        return f"{parent.owner} no longer exists"
    return "" if _record_id(Path(parent.owner)) == parent.record else f"{parent.owner} now holds another run"


def parents_of(config: dict[str, Any], *, folder: Path, run: Path) -> list[Parent]:
    """Return the files that a configuration uses from runs other than `run`. Its relative paths start in `folder`."""
    found = []
    for key, value in flat(config).items():
        for text in texts_in(value) if key not in _OWN_PLACE else ():
            path = folder / os.path.expanduser(text)
            owner = _owner(path.resolve()) if os.sep in text and path.exists() else None
            if owner is not None and owner != run.resolve():
                found.append(Parent(key=key, path=text, owner=str(owner), record=_record_id(owner)))
    return found


def lineage(run: Path, *, below: frozenset[Path] = frozenset()) -> list[Ancestor]:
    """Return a run and all its ancestors. Each run comes before the runs that used something from it.

    `below`: the runs that lead to this run. Two folders can have used each other in turn.
    """
    below |= {run.resolve()}
    starts = Provenance(run).read().starts
    parents = list(dict.fromkeys(parent for start in starts for parent in start.taken))
    used = [Path(parent.owner) for parent in parents if not fate_of(parent) and Path(parent.owner) not in below]
    earlier = [ancestor for parent in used for ancestor in lineage(parent, below=below)]
    by_run = {ancestor.run.resolve(): ancestor for ancestor in (*earlier, Ancestor(run, starts, parents))}
    return list(by_run.values())


def _record_id(run: Path) -> str:
    return str(RunDirectory(run).read_summary().get("record_id", ""))


def _owner(path: Path) -> Path | None:
    """Return the run that owns a path, because the path is in the run's directory."""
    for folder in (path, *path.parents):
        directory = RunDirectory(folder)
        if (folder / "config.yaml").is_file() and (directory.summary.is_file() or directory.checkpoints.is_dir()):
            return folder
    return None
