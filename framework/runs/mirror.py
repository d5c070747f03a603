"""A run's mirror in an object store: who holds it, what is in it, and how a run's directory is fetched from it.

Each command that writes there has a numbered folder of its own, `MIRROR/NAME/ID/000001/`, which begins with a claim that is
created exclusively. Nobody writes in the folder of another, and the highest number is the holder's: a command that was frozen,
or cut off, while another took over does no harm.
"""

import json
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from framework.checkpoint import manifest
from framework.runs.directory import RunDirectory
from framework.runtime.exits import Interrupted, NoValidCheckpoint
from framework.runtime.files import flush_directory, make_directory, replacing, write_atomically
from framework.runtime.lock import RunLocked, is_gone, process_identity
from framework.runtime.log import LOGGER
from framework.runtime.objects import ObjectFacts, Objects, StoreFailed, inside
from framework.runtime.plain import Invalid
from framework.runtime.preemption import PREEMPTION

RECORDS = ("config.yaml", "provenance.json", "metrics.jsonl", "train.log", "curves.png", "model.safetensors", "summary.json")
SIGN_S = 3.0  # between two signs of life of a holder
_DEAD_AFTER_S = 12.0  # without one
_CHECKPOINT = re.compile(r"(?:(\d{6})/)?checkpoints/(step_\d{8,18})/([^/]+)")


@dataclass(frozen=True)
class Holding:
    """A command's right to write in a mirror: the number of its folder, and from which on the folders are this run's."""

    number: int
    begins: int
    token: str


class StoredCheckpoint(NamedTuple):
    """A committed checkpoint in a store."""

    step: int
    number: int  # of the folder that it is in; 0: in none, as in a copy of a run's directory
    name: str

    @property
    def folder(self) -> str:
        return f"{f'{self.number:06d}/' if self.number else ''}checkpoints/{self.name}"


class Contents(NamedTuple):
    """What a mirror holds."""

    number: int  # the holder's, or the last holder's; 0: there has not been one
    holder: dict[str, Any]
    objects: dict[str, ObjectFacts]

    @property
    def begins(self) -> int:
        """The number of the first folder of this run; the folders before are of runs that run.resume=never has left aside."""
        begins = self.holder.get("begins")
        return begins if isinstance(begins, int) else 0

    @property
    def folders(self) -> dict[tuple[int, str], list[str]]:
        """The objects of this run's checkpoints, committed or not, by the number of the folder and the checkpoint's name."""
        found: dict[tuple[int, str], list[str]] = {}
        for name in self.objects:
            match = _CHECKPOINT.fullmatch(name)
            if match and int(match[1] or 0) >= self.begins:
                found.setdefault((int(match[1] or 0), match[2]), []).append(name)
        return found

    @property
    def checkpoints(self) -> list[StoredCheckpoint]:
        """The committed checkpoints, the newest first."""
        found = [StoredCheckpoint(manifest.step_of(Path(name)) or 0, number, name) for number, name in self.folders]
        return sorted((one for one in found if f"{one.folder}/{manifest.MANIFEST}" in self.objects), reverse=True)


class Mirror:
    """A run's mirror, seen from the run's directory, of which the caller has the lock. Methods may raise StoreFailed."""

    def __init__(self, url: str, directory: RunDirectory) -> None:
        self.objects, self.directory = Objects(url), directory
        self.url = self.objects.url
        self._file = directory.path / "mirror.json"

    # --- who holds it

    def look(self) -> Contents:
        """Return what is there."""
        return contents_of(self.objects)

    def require_free(self, contents: Contents) -> None:
        """Raise RunLocked if another command writes there: it gives a sign of life within some seconds."""
        holder, sign_name = contents.holder, f"{contents.number:06d}/alive.json"
        before = _read(self.objects, sign_name)
        known = self._known  # a holder that worked in this directory, and not in one that this is a copy of, is gone
        is_ours = "token" in holder and holder["token"] == known.get("token") and self._inode == known.get("inode")
        if not contents.number or before.get("released") or is_ours or is_gone(holder):
            return
        LOGGER.info("waiting %.0f s for a sign of life of the command that has last written to %s", _DEAD_AFTER_S, self.url)
        began = time.monotonic()
        while time.monotonic() - began < _DEAD_AFTER_S:
            if PREEMPTION.requested:
                raise Interrupted("stopped before the run's mirror was free; the same command begins")
            if _read(self.objects, sign_name) != before:
                raise self._locked(holder)
            time.sleep(0.5)

    def take(self, contents: Contents) -> Holding:
        """Claim the mirror, as it was last seen. RunLocked if another command has done so meanwhile."""
        token, number = secrets.token_hex(8), contents.number + 1
        is_anew = not contents.begins or bool(self._known.get("anew"))
        holding = Holding(number, number if is_anew else contents.begins, token)
        claim = asdict(holding) | {"host": socket.gethostname(), "pid": os.getpid()} | process_identity()
        name = _claim_name(number)
        if not self.objects.create(name, json.dumps(claim).encode()):
            raise self._locked(_read(self.objects, name))
        if self.objects.create(name, b"{}"):
            self.objects.remove(name)
            raise StoreFailed(f"{self.url} is in a store that does not know conditional writes: it has written over an "
                              "object that was to be created", is_wrong=True)  # fmt: skip
        write_atomically(self._file, json.dumps({"url": self.url, "inode": self._inode, **asdict(holding)}) + "\n")
        return holding

    def begin_anew(self) -> None:
        """Note in the directory, which is empty, that what is in the mirror is to be left aside."""
        write_atomically(self._file, json.dumps({"url": self.url, "anew": True}) + "\n")

    @property
    def _inode(self) -> int:
        return self.directory.path.stat().st_ino

    @property
    def _known(self) -> dict[str, Any]:
        """What the directory remembers of this mirror."""
        with suppress(OSError, ValueError, RecursionError):
            known = json.loads(self._file.read_text())
            if isinstance(known, dict) and known.get("url") == self.url:
                return known
        return {}

    def _locked(self, holder: dict[str, Any]) -> RunLocked:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}"
        return RunLocked(f"{self.url} is in use by {who}; wait for it, or stop it")

    def is_complete(self, contents: Contents) -> bool:
        """Return whether the last holder has put everything there, at its end."""
        return bool(_read(self.objects, f"{contents.number:06d}/alive.json").get("complete")) if contents.number else False

    def is_another(self, contents: Contents) -> bool:
        """Return whether the mirror holds a later beginning of the run than the directory, by run.resume=never elsewhere."""
        return bool(contents.number) and self._known.get("begins", contents.begins) < contents.begins

    # --- from it into the directory

    def fetch(self, contents: Contents) -> bool:
        """Fetch the newest valid checkpoint, and the records, if they are ahead of the directory's. Returns whether they are.

        NoValidCheckpoint if all that are there are damaged, and the directory has none.
        """
        if self._known.get("anew") or not contents.number:
            return False
        if self.is_another(contents):
            LOGGER.info("%s holds a later beginning of this run: the earlier one is now in %s",
                        self.url, self.directory.move_aside())  # fmt: skip
        here = [manifest.step_of(path) or 0 for path in manifest.candidates(self.directory.checkpoints) if _has_manifest(path)]
        newest = max(here, default=-1)
        last = f"{contents.number:06d}/"
        is_finished = _read(self.objects, f"{last}summary.json").get("status") == "finished" and not self.directory.is_finished
        ahead = [stored for stored in contents.checkpoints if stored.step > newest]
        stored = fetch_newest(self.objects, ahead, contents, into=self.directory.checkpoints, has_other=bool(here))
        if stored is None and not is_finished:
            return False
        source = last if is_finished or stored is None else f"{stored.number:06d}/"
        for name in RECORDS:  # the summary last: it may say that the run is finished
            if source + name in contents.objects:
                with replacing(self.directory.path / name) as beside:
                    self.objects.get(source + name, beside)
        return True


def contents_of(objects: Objects) -> Contents:
    """Return what is in a mirror; or in a copy of a run's directory, of which there is no holder."""
    found = objects.listing()
    numbers = sorted((int(name[:6]) for name in found if re.fullmatch(r"\d{6}/claim\.json", name)), reverse=True)
    claims = (_read(objects, _claim_name(number)) for number in numbers)  # on a file system a kill may cut one short
    return Contents(max(numbers, default=0), next(filter(None, claims), {}), found)


def _read(objects: Objects, name: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        content = json.loads(objects.read(name) or b"{}")
        return content if isinstance(content, dict) else {}
    return {}


def _claim_name(number: int) -> str:
    return f"{number:06d}/claim.json"


def _has_manifest(path: Path) -> bool:
    try:
        return bool(manifest.read_manifest(path))
    except (Invalid, OSError):
        return False


def fetch_newest(
    objects: Objects, wanted: list[StoredCheckpoint], contents: Contents, *, into: Path, has_other: bool = False
) -> StoredCheckpoint | None:
    """Fetch the first of these checkpoints that is valid into a folder; None if there is none.

    NoValidCheckpoint if none of several is, unless `has_other`: then there is another way to go on.
    """
    reasons = []
    for stored in wanted:
        try:
            _fetch_checkpoint(objects, stored, contents, into=into)
            LOGGER.info("fetched %s from %s", stored.name, objects.url)
            return stored
        except Invalid as error:
            reasons.append(f"{objects.url}/{stored.folder}: {error}")
            LOGGER.warning("%s; passing over it", reasons[-1])
    if reasons and not has_other:
        raise NoValidCheckpoint("no valid checkpoint is left:\n  " + "\n  ".join(reasons))
    return None


def _fetch_checkpoint(objects: Objects, stored: StoredCheckpoint, contents: Contents, *, into: Path) -> None:
    staging = into / f".tmp_{secrets.token_hex(8)}"
    path, target = staging / stored.name, into / stored.name
    make_directory(into)
    try:
        path.mkdir(parents=True)
        for name in contents.folders[stored.number, stored.name]:
            with replacing(inside(path, name.rpartition("/")[2])) as beside:
                objects.get(name, beside)
        for name, entry in manifest.read_manifest(path).items():
            manifest.verify_file(path / name, entry)
        flush_directory(path)
        if target.exists():  # damaged
            manifest.discard(target)
        os.rename(path, target)
        flush_directory(into)
    finally:
        manifest.remove(staging)
