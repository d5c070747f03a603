"""A run's mirror: a copy of its directory in an object store, under the same names, and the one command that writes there."""

import json
import os
import secrets
import socket
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from framework.checkpoint import manifest
from framework.checkpoint.manifest import MANIFEST, candidates, read_manifest
from framework.config.schema import RunSection
from framework.runs.directory import RunDirectory
from framework.runtime.exits import Exit, NoValidCheckpoint, RunEnded
from framework.runtime.files import facts_in, flush_to_disk, make_directory, replacing
from framework.runtime.lock import RunLocked, is_alive, process_identity
from framework.runtime.log import LOGGER
from framework.runtime.objects import Objects, StoreFailed, fetched_once, inside, is_url
from framework.runtime.plain import Invalid
from framework.runtime.problem import Problem

# The last file shows whether the run is finished.
RECORDS = ("config.yaml", "provenance.json", "metrics.jsonl", "train.log", "curves.png", "model.safetensors", "summary.json")
_OWNER = "owner.json"


class MirrorTaken(RunEnded):
    """Another command has taken the mirror."""


class Mirror:
    """A run's mirror, for a command that holds the lock of the run's directory. Methods may raise StoreFailed or MirrorTaken.

    `owner.json` names the command that writes there. The same command elsewhere takes the mirror over: the earlier owner looks
    for its name before each commit and each removal, and stops. A checkpoint counts when its manifest is uploaded.
    """

    def __init__(self, url: str, directory: RunDirectory) -> None:
        self.objects, self.directory = Objects(url, heeds_signals=True), directory
        self.url = self.objects.url
        self._token = ""
        self._committed: dict[str, bytes] = {}  # the manifests of the checkpoints that were uploaded, by name
        self._is_whole = False  # whether the last upload is done

    # --- the owner

    def take(self) -> None:
        """Become the owner. Raise RunLocked if the owner is a living process of this machine, or takes the mirror just now."""
        owner = read_facts(self.objects, _OWNER)
        if is_alive(owner):
            raise RunLocked(self.url, owner)
        self.objects.remove(_OWNER)
        self._token = secrets.token_hex(8)
        mine = {"token": self._token, "host": socket.gethostname(), "pid": os.getpid()} | process_identity()
        if not self.objects.create(_OWNER, json.dumps(mine).encode()):
            raise RunLocked(self.url, read_facts(self.objects, _OWNER))
        there = committed(self.objects.listing("checkpoints"))
        self._committed = {name: self.objects.read(f"checkpoints/{name}/{MANIFEST}") or b"" for name in there}

    def _require(self) -> None:
        """Raise MirrorTaken if another command is the owner. Call this before a write that changes the run's state."""
        if read_facts(self.objects, _OWNER).get("token") != self._token:
            raise MirrorTaken(
                f"{self.url} has been taken by another command; this command stops, and writes nothing more there"
            )

    def move_aside(self) -> None:
        """Move the content to the next free `URL.old-N`, the manifests first: without it, a checkpoint does not count."""
        found, number = self.objects.listing(), 1
        if not found:
            return
        while (aside := Objects(f"{self.url}.old-{number}")).listing():
            number += 1
        for name in sorted(found, key=lambda name: not name.endswith((MANIFEST, "summary.json"))):
            self.objects.move(name, aside, num_bytes=found[name].size)
        LOGGER.info("the mirror of the earlier run is now in %s", aside.url)

    # --- the way there

    def sync(self, *, is_last: bool = False) -> None:
        """Upload the missing checkpoints, newest first, and the records; then remove what the run has pruned."""
        paths = candidates(self.directory.checkpoints)
        new, names = [path for path in paths if self._is_new(path)], {path.name for path in paths}
        if not new and not is_last and not self._committed.keys() - names:
            return
        there = self.objects.listing()
        self._require()
        for path in new:
            self._put_checkpoint(path, there)
        if is_last:
            self._put_records(is_last=True)
            self._is_whole = True
        if paths and paths[0].name in self._committed:
            gone = [name for name in there if name.startswith("checkpoints/") and name.split("/")[1] not in names]
            if gone:
                self._require()
            self._remove(gone)
            self._committed = {name: content for name, content in self._committed.items() if name in names}

    @property
    def missing(self) -> list[str]:
        """What is in the directory, but not in the mirror."""
        checkpoints = [path for path in candidates(self.directory.checkpoints) if self._is_new(path)]
        return [f"checkpoints/{path.name}" for path in checkpoints] + ([] if self._is_whole else self._records)

    @property
    def _records(self) -> list[str]:
        return [name for name in RECORDS if (self.directory.path / name).exists()]

    def _is_new(self, path: Path) -> bool:
        """Return whether a checkpoint must be uploaded. A checkpoint that is damaged or was just pruned must not."""
        return _manifest_of(path) not in (b"", self._committed.get(path.name))

    def _put_checkpoint(self, path: Path, there: Iterable[str]) -> None:
        """Upload a checkpoint's files, the rows until its step, and then its manifest. Stop if the run prunes it meanwhile."""
        folder = f"checkpoints/{path.name}"
        self._remove(name for name in there if name.startswith(f"{folder}/"))  # the run may have gone back behind it
        try:
            content = (path / MANIFEST).read_bytes()
            for name in read_manifest(path):
                self.objects.put(path / name, f"{folder}/{name}")
        except (OSError, Invalid):
            if path.exists():
                raise
            return
        self._put_records(is_last=False)
        self._require()
        self.objects.write(f"{folder}/{MANIFEST}", content)
        self._committed[path.name] = content

    def _put_records(self, *, is_last: bool) -> None:
        """Upload the records. Upload the state "finished" only after everything else."""
        for name in self._records:
            if name == "summary.json":  # upload the content as it was read: the run may end at any moment
                summary = self.directory.read_summary()
                if not is_last and summary.get("status") == "finished":
                    continue
                self.objects.write(name, (json.dumps(summary, indent=1) + "\n").encode())
            else:
                self.objects.put(self.directory.path / name, name)

    def _remove(self, names: Iterable[str]) -> None:
        for name in sorted(names, key=lambda name: not name.endswith(MANIFEST)):  # first the manifest, which commits it
            self.objects.remove(name)

    # --- the way back

    def bring_back(self) -> bool:
        """Fetch the mirror's checkpoints and records if they are ahead of the directory's. Return whether they are.

        A directory of an earlier start of the run (`run.resume=never` was given elsewhere) is moved aside. Raise
        NoValidCheckpoint if checkpoints exist, but none is valid, neither in the mirror nor in the directory.
        """
        there = self.objects.listing()
        if self.is_another_start():
            LOGGER.info(
                "%s holds a later start of this run: the earlier one is now in %s", self.url, self.directory.move_aside()
            )
        here = {path.name for path in candidates(self.directory.checkpoints) if _manifest_of(path)}
        is_finished, newest = not self.directory.is_finished and self.is_finished, max(here, key=_step, default="")
        wanted = [name for name in committed(there) if name not in here]
        if not is_finished and all(_step(name) < _step(newest) for name in wanted):
            return False
        make_directory(self.directory.checkpoints)
        manifest.remove_unfinished(self.directory.checkpoints)  # a finished run would never do this
        staging = self.directory.checkpoints / f".tmp_{secrets.token_hex(8)}"
        try:
            fetched = list[str]()
            with suppress(NoValidCheckpoint) if here else nullcontext():  # the run can continue from another checkpoint
                fetched += fetch_valid(self.objects, wanted, there, into=staging)
            if not is_finished and all(_step(name) < _step(newest) for name in fetched):
                return False
            # with this order a kill leaves nothing that looks complete: the rows come before the checkpoint that needs them
            self._get_records(RECORDS[:-1], there)
            for name in reversed(fetched):
                target = self.directory.checkpoints / name
                if target.exists():  # the checkpoint is damaged
                    manifest.discard(target)
                os.rename(staging / name, target)
            flush_to_disk(self.directory.checkpoints)
            self._get_records(RECORDS[-1:], there)
        finally:
            manifest.remove(staging)
        return True

    def is_another_start(self) -> bool:
        """Return whether the mirror's run was started over after the start of the directory's run."""
        ours, theirs = (
            facts.get("record_id") for facts in (self.directory.read_summary(), read_facts(self.objects, "summary.json"))
        )
        return None not in (ours, theirs) and ours != theirs

    @property
    def is_finished(self) -> bool:
        """Whether the mirror holds the whole finished run: its summary, which is uploaded last, says so."""
        return read_facts(self.objects, "summary.json").get("status") == "finished"

    def _get_records(self, names: Iterable[str], there: Iterable[str]) -> None:
        for name in names:
            if name in there:
                with replacing(self.directory.path / name) as beside:
                    self.objects.get(name, beside)


def committed(names: Iterable[str]) -> list[str]:
    """Return the names of the committed checkpoints among a run's objects, newest first."""
    folders = [Path(name).parent for name in names if name.startswith("checkpoints/") and name.endswith(f"/{MANIFEST}")]
    return sorted((folder.name for folder in folders if manifest.step_of(folder) is not None), key=_step, reverse=True)


def _step(name: str) -> int:
    step = manifest.step_of(Path(name))
    return -1 if step is None else step


def _manifest_of(path: Path) -> bytes:
    """Return the content of a checkpoint's manifest; empty if the checkpoint is damaged, or was just pruned."""
    with suppress(Invalid, OSError):
        read_manifest(path)
        return (path / MANIFEST).read_bytes()
    return b""


def read_facts(objects: Objects, name: str) -> dict[str, Any]:
    """Return the JSON in an object, or {} if the object does not exist or is damaged."""
    return facts_in(objects.read(name) or b"")


def fetch_valid(objects: Objects, wanted: Iterable[str], there: Iterable[str], *, into: Path) -> Iterator[str]:
    """Fetch the checkpoints of these names into a folder, and yield the names of the valid ones.

    Raise NoValidCheckpoint at the end if none of several is valid.
    """
    is_one_valid, reasons = False, list[str]()
    for checkpoint in wanted:
        path = into / checkpoint
        path.mkdir(parents=True)
        try:
            for name in (name for name in there if name.startswith(f"checkpoints/{checkpoint}/")):
                with replacing(inside(path, name.rpartition("/")[2])) as beside:
                    objects.get(name, beside)
            for name, entry in read_manifest(path).items():
                manifest.verify_file(path / name, entry)
            flush_to_disk(path)
            LOGGER.info("fetched %s from %s", checkpoint, objects.url)
            is_one_valid = True
            yield checkpoint
        except Invalid as error:
            manifest.remove(path)
            reasons.append(f"{objects.url}/checkpoints/{checkpoint}: {error}")
            LOGGER.warning("%s; skipping it", reasons[-1])
    if reasons and not is_one_valid:
        raise NoValidCheckpoint("no valid checkpoint is left:\n  " + "\n  ".join(reasons))


# --- run.resume=s3://...: a run or checkpoint in an object store, from which another run starts


def with_fetched_resume(run: RunSection) -> tuple[RunSection, list[Problem]]:
    """Return the section with a local copy for a URL in `resume`, unless the run has its own checkpoints."""
    if not is_url(run.resume) or candidates(RunDirectory(Path(run.dir)).checkpoints):
        return run, []
    try:
        return run.model_copy(update={"resume": str(_fetch_run(run.resume))}), []
    except StoreFailed as failure:
        expected = "the URL of a run or checkpoint that can be read" if failure.is_wrong else "the same command tries again"
        code = Exit.CONFIGURATION if failure.is_wrong else Exit.DISK
        return run, [Problem("run.resume", str(failure), expected, code=code)]
    except RunEnded as end:
        return run, [Problem("run.resume", str(end), code=end.code)]


def _fetch_run(url: str) -> Path:
    """Return the local path of a run or checkpoint in a store, with its rows and its newest valid (or the named) checkpoint.

    Raise StoreFailed if it does not exist or cannot be fetched.
    Raise NoValidCheckpoint if all checkpoints are damaged.
    """
    parent, _, last = url.rstrip("/").rpartition("/")
    is_checkpoint = manifest.step_of(Path(last)) is not None
    objects = Objects(parent.removesuffix("/checkpoints") if is_checkpoint else url, heeds_signals=True)
    there = objects.listing()
    wanted = [name for name in committed(there) if name == last or not is_checkpoint]
    if not wanted:
        raise StoreFailed(f"{url} has no checkpoint", is_wrong=True)

    def fetch(folder: Path) -> None:
        next(fetch_valid(objects, wanted, there, into=folder / "checkpoints"))
        if "metrics.jsonl" in there:
            objects.get("metrics.jsonl", folder / "metrics.jsonl")

    run = fetched_once([url, *(there[f"checkpoints/{name}/{MANIFEST}"].version for name in wanted)], fetch)
    return next((run / "checkpoints").iterdir()) if is_checkpoint else run
