"""A run's mirror in an object store: who holds it, and what is in it.

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
from framework.runtime.exits import Interrupted
from framework.runtime.files import write_atomically
from framework.runtime.lock import RunLocked, is_gone, process_identity
from framework.runtime.log import LOGGER
from framework.runtime.objects import ObjectFacts, Objects, StoreFailed
from framework.runtime.preemption import PREEMPTION

# The last says whether the run is finished.
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
        self.objects, self.directory = Objects(url, heeds_signals=True), directory
        self.url = self.objects.url
        self._file = directory.path / "mirror.json"

    def look(self) -> Contents:
        """Return what is there."""
        return contents_of(self.objects)

    def require_free(self, contents: Contents) -> None:
        """Raise RunLocked if another command writes there: it gives a sign of life within some seconds."""
        holder, sign_name = contents.holder, f"{contents.number:06d}/alive.json"
        before = read_facts(self.objects, sign_name)
        known = self.known  # a holder that worked in this directory, and not in one that this is a copy of, is gone
        is_ours = "token" in holder and holder["token"] == known.get("token") and self._inode == known.get("inode")
        if not contents.number or before.get("released") or is_ours or is_gone(holder):
            return
        LOGGER.info("waiting %.0f s for a sign of life of the command that has last written to %s", _DEAD_AFTER_S, self.url)
        began = time.monotonic()
        while time.monotonic() - began < _DEAD_AFTER_S:
            if PREEMPTION.requested:
                raise Interrupted("stopped before the run's mirror was free; the same command begins")
            if read_facts(self.objects, sign_name) != before:
                raise self._locked(holder)
            time.sleep(0.5)

    def take(self, contents: Contents) -> Holding:
        """Claim the mirror, as it was last seen. RunLocked if another command has done so meanwhile."""
        token, number = secrets.token_hex(8), contents.number + 1
        is_anew = not contents.begins or bool(self.known.get("anew"))
        holding = Holding(number, number if is_anew else contents.begins, token)
        claim = asdict(holding) | {"host": socket.gethostname(), "pid": os.getpid()} | process_identity()
        name = _claim_name(number)
        if not self.objects.create(name, json.dumps(claim).encode()):
            raise self._locked(read_facts(self.objects, name))
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
    def known(self) -> dict[str, Any]:
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
        return bool(read_facts(self.objects, f"{contents.number:06d}/alive.json").get("complete")) if contents.number else False

    def is_another(self, contents: Contents) -> bool:
        """Return whether the mirror holds a later beginning of the run than the directory, by run.resume=never elsewhere."""
        return bool(contents.number) and self.known.get("begins", contents.begins) < contents.begins


def contents_of(objects: Objects) -> Contents:
    """Return what is in a mirror; or in a copy of a run's directory, of which there is no holder."""
    found = objects.listing()
    numbers = sorted((int(name[:6]) for name in found if re.fullmatch(r"\d{6}/claim\.json", name)), reverse=True)
    claims = (read_facts(objects, _claim_name(number)) for number in numbers)  # on a file system a kill may cut one short
    return Contents(max(numbers, default=0), next(filter(None, claims), {}), found)


def read_facts(objects: Objects, name: str) -> dict[str, Any]:
    """Return the JSON in an object; empty if there is none, or it is damaged."""
    with suppress(ValueError, RecursionError):
        content = json.loads(objects.read(name) or b"{}")
        return content if isinstance(content, dict) else {}
    return {}


def _claim_name(number: int) -> str:
    return f"{number:06d}/claim.json"
