"""The lineage of a run: its starts, and the other runs that have written the checkpoints and weights it has used."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.identity import flat
from framework.runs.directory import RunDirectory
from framework.runs.provenance import Provenance

_OWN_PLACE = ("run.id", "run.dir", "run.root", "run.mirror")


@dataclass(frozen=True)
class Parent:
    """A file or folder that a run's configuration names, and the run that has written it."""

    key: str  # the key in the configuration
    path: str
    run: Path
    record_id: str  # the id of the run's record at that time; a later run in the same folder has another id

    def record(self) -> dict[str, str]:
        """Return the entry for provenance.json."""
        return {"key": self.key, "path": self.path, "owner": str(self.run), "record": self.record_id}

    @property
    def label(self) -> str:
        return "/".join(self.run.parts[-2:])

    @property
    def fate(self) -> str:
        """What has happened to the run since. Empty if it is unchanged."""
        if not self.run.is_dir():
            return f"{self.run} no longer exists"
        return "" if _record_id(self.run) == self.record_id else f"{self.run} now holds another run"


@dataclass(frozen=True)
class Ancestor:
    """A run, and what it has used from other runs."""

    run: Path
    starts: list[dict[str, Any]]  # from provenance.json
    parents: list[Parent]


def parents_of(config: dict[str, Any], *, folder: Path, run: Path) -> list[Parent]:
    """Return the files that a configuration uses from runs other than `run`. Its relative paths start in `folder`."""
    found = []
    for key, value in flat(config).items():
        for text in _texts(value) if key not in _OWN_PLACE else ():
            path = folder / os.path.expanduser(text)
            owner = _owner(path.resolve()) if os.sep in text and path.exists() else None
            if owner is not None and owner != run.resolve():
                found.append(Parent(key, text, owner, _record_id(owner)))
    return found


def lineage(run: Path, *, below: frozenset[Path] = frozenset()) -> list[Ancestor]:
    """Return a run and all its ancestors. Each run comes before the runs that used something from it.

    `below`: the runs that lead to this run. Two folders can have used each other in turn.
    """
    below |= {run.resolve()}
    starts = Provenance(run).read()["starts"]
    parents = list(dict.fromkeys(_recorded(starts)))
    used = [parent.run for parent in parents if not parent.fate and parent.run not in below]
    earlier = [ancestor for parent in used for ancestor in lineage(parent, below=below)]
    by_run = {ancestor.run.resolve(): ancestor for ancestor in (*earlier, Ancestor(run, starts, parents))}
    return list(by_run.values())


def _recorded(starts: list[dict[str, Any]]) -> list[Parent]:
    """Return the parents that the starts have recorded, from the first start to the last."""
    taken = [item for start in starts for items in [start.get("taken")] if isinstance(items, list) for item in items]
    names = ("key", "path", "owner", "record")
    return [Parent(item["key"], item["path"], Path(item["owner"]), item["record"]) for item in taken
            if isinstance(item, dict) and all(isinstance(item.get(name), str) for name in names)]  # fmt: skip


def _record_id(run: Path) -> str:
    return str(RunDirectory(run).read_summary().get("record_id", ""))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _owner(path: Path) -> Path | None:
    """Return the run that owns a path, because the path is in the run's directory."""
    for folder in (path, *path.parents):
        directory = RunDirectory(folder)
        if (folder / "config.yaml").is_file() and (directory.summary.is_file() or directory.checkpoints.is_dir()):
            return folder
    return None
