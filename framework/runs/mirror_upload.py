"""The upload of a run's files into its mirror, and the removal of files that the run has pruned."""

import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from framework.checkpoint.manifest import MANIFEST, candidates, read_manifest
from framework.runs.directory import RunDirectory
from framework.runs.mirror import RECORDS, SIGN_S, Contents, Holding
from framework.runtime.objects import Objects, StoreFailed
from framework.runtime.plain import Invalid

_RECORDS_EVERY_S = 60.0  # and also with each checkpoint
_Version = tuple[int, int, int]


class MirrorTaken(Exception):
    """Another command has taken the mirror."""


class Upload:
    """The upload that makes a mirror equal to the run's directory. Methods may raise OSError or MirrorTaken."""

    def __init__(self, objects: Objects, directory: RunDirectory, holding: Holding) -> None:
        self._objects, self._directory, self._holding = objects, directory, holding
        self._folder = f"{holding.number:06d}"
        self._committed: dict[str, bytes] = {}  # the manifests of the mirror's checkpoints, by name
        self._has_looked = False
        self._records: dict[str, _Version] = {}  # the versions that were uploaded
        self._records_at = -math.inf
        self._is_pruned = False

    def _contents(self) -> Contents:
        """Return the mirror's content without the folders of later holders. Their files must not be removed at any time."""
        found = self._objects.listing()
        own = {name: facts for name, facts in found.items() if name[:6] <= self._folder}
        return Contents(self._holding.number, {"begins": self._holding.begins}, own)

    def sync(self, *, is_last: bool = False) -> None:
        """Upload the missing checkpoints, newest first; then the records, if it is time for them; then prune."""
        if not self._has_looked:
            found = reversed(self._contents().checkpoints)
            self._committed = {one.name: self._objects.read(f"{one.folder}/{MANIFEST}") or b"" for one in found}
            self._has_looked = True
        for path in candidates(self._directory.checkpoints):
            if self._is_new(path):
                self._put_checkpoint(path)
        if is_last or time.monotonic() - self._records_at > _RECORDS_EVERY_S:
            self._put_records(is_last=is_last)
        self._prune()

    @property
    def missing(self) -> list[str]:
        """What is in the directory, but not in the mirror."""
        checkpoints = [path for path in candidates(self._directory.checkpoints) if self._is_new(path)]
        return [f"checkpoints/{path.name}" for path in checkpoints] + [*self._changed]

    @property
    def _changed(self) -> dict[str, _Version]:
        """The records that differ from the mirror's records."""
        versions = {name: version for name in RECORDS if (version := self._version(name)) is not None}
        return {name: version for name, version in versions.items() if version != self._records.get(name)}

    def _is_new(self, path: Path) -> bool:
        return (content := _manifest_of(path)) is not None and content != self._committed.get(path.name)

    def _put_checkpoint(self, path: Path) -> None:
        """Upload a checkpoint's files, then its manifest, which commits it. Skip a checkpoint that the run prunes meanwhile."""
        content, folder = _manifest_of(path), f"{self._folder}/checkpoints/{path.name}"
        self._is_pruned = False
        self._remove(f"{folder}/{name}" for name in self._objects.listing(folder))  # the run may have gone back behind it
        try:
            for name in read_manifest(path):
                self._objects.put(path / name, f"{folder}/{name}")
        except Invalid:
            return
        except OSError:
            if path.exists():
                raise
            return
        self._put_records(is_last=False)  # the rows until its step, which the checkpoint needs
        self._require()
        if content is not None:
            self._objects.write(f"{folder}/{MANIFEST}", content)
            self._committed[path.name] = content

    def _put_records(self, *, is_last: bool) -> None:
        """Upload the changed records. Upload the state "finished" only after everything else."""
        changed = self._changed
        if changed:
            self._require()
        for name, version in changed.items():
            if name == "summary.json":  # upload the content as it was read: the run may end at any moment
                summary = self._directory.read_summary()
                if not is_last and summary.get("status") == "finished":
                    continue
                self._objects.write(f"{self._folder}/{name}", (json.dumps(summary, indent=1) + "\n").encode())
            else:
                self._objects.put(self._directory.path / name, f"{self._folder}/{name}")
            self._records[name] = version
        self._records_at = time.monotonic()

    def _version(self, name: str) -> _Version | None:
        with suppress(OSError):
            status = (self._directory.path / name).stat()
            return status.st_ino, status.st_size, status.st_mtime_ns
        return None

    def _prune(self) -> None:
        """Remove the mirror's checkpoints that the directory does not have, if the mirror has the directory's newest."""
        names = [path.name for path in candidates(self._directory.checkpoints)]
        if not names or names[0] not in self._committed or (self._is_pruned and not self._committed.keys() - {*names}):
            return
        self._require()
        contents = self._contents()
        kept = {stored.name: stored.number for stored in reversed(contents.checkpoints) if stored.name in names}
        for (number, name), objects in contents.folders.items():
            if kept.get(name) != number:
                self._remove(objects)
        self._committed = {name: content for name, content in self._committed.items() if name in names}
        used = {*kept.values(), self._holding.number}
        before = {f"{number:06d}/" for number in range(self._holding.begins, self._holding.number) if number not in used}
        if self._records:  # remove the files of holders without checkpoints, except the claims, which other commands look for
            self._remove(name for name in contents.objects if name[:7] in before and not name.endswith("/claim.json"))
        self._is_pruned = True

    def _remove(self, names: Iterable[str]) -> None:
        for name in sorted(names, key=lambda name: not name.endswith(MANIFEST)):  # first the manifest, which commits it
            self._objects.remove(name)

    def _require(self) -> None:
        """Raise MirrorTaken if another command has taken the mirror. Call this before a write that changes the run's state."""
        if self._objects.read(f"{self._holding.number + 1:06d}/claim.json") is not None:
            raise MirrorTaken

    @contextmanager
    def signs(self) -> Iterator[Event]:
        """Give signs of life in a thread. Yield an event, which is set when another command has taken the mirror."""
        ended, superseded = Event(), Event()

        def give() -> None:
            number = 0
            while not superseded.is_set():
                with suppress(StoreFailed):
                    try:
                        self._require()
                        self._sign(beat=number)
                    except MirrorTaken:
                        superseded.set()
                number += 1
                if ended.wait(SIGN_S):
                    return

        thread = Thread(target=give, name="signs", daemon=True)
        thread.start()
        try:
            yield superseded
        finally:
            ended.set()
            thread.join()

    def release(self, *, is_complete: bool) -> None:
        """Release the mirror, so that the next command does not wait for a sign of life."""
        self._sign(released=True, complete=is_complete)

    def _sign(self, **values: object) -> None:
        self._objects.write(f"{self._folder}/alive.json", json.dumps(values).encode())


def _manifest_of(path: Path) -> bytes | None:
    """Return the manifest of a checkpoint, or None if the checkpoint has been pruned or is damaged."""
    with suppress(OSError, Invalid):
        read_manifest(path)
        return (path / MANIFEST).read_bytes()
    return None
