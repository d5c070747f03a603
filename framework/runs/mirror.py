"""A run's mirror in an object store: its holder and its content.

Each command that writes to the mirror has its own numbered folder, `MIRROR/NAME/ID/000001/`. The folder begins with a claim
that is created exclusively. No command writes into the folder of another command, and the highest number belongs to the
holder. So a command that was frozen or disconnected does no harm after another command has taken over.
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
from framework.runtime.lock import RunLocked, is_alive, process_identity
from framework.runtime.log import LOGGER
from framework.runtime.objects import ObjectFacts, Objects, StoreFailed
from framework.runtime.preemption import PREEMPTION

# The last file shows whether the run is finished.
RECORDS = ("config.yaml", "provenance.json", "metrics.jsonl", "train.log", "curves.png", "model.safetensors", "summary.json")
SIGN_S = 3.0  # between two signs of life of a holder
_DEAD_AFTER_S = 12.0  # without a sign of life
_CHECKPOINT = re.compile(r"(?:(\d{6})/)?checkpoints/(step_\d{8,18})/([^/]+)")


@dataclass(frozen=True)
class Holding:
    """A command's right to write in a mirror: the number of its folder, and the number of this run's first folder."""

    number: int
    begins: int
    token: str


class StoredCheckpoint(NamedTuple):
    """A committed checkpoint in a store."""

    step: int
    number: int  # the number of its folder; 0: no numbered folder, as in a copy of a run's directory
    name: str

    @property
    def folder(self) -> str:
        return f"{f'{self.number:06d}/' if self.number else ''}checkpoints/{self.name}"


class Contents(NamedTuple):
    """The content of a mirror."""

    number: int  # the number of the present or last holder; 0: there was no holder
    holder: dict[str, Any]
    objects: dict[str, ObjectFacts]

    @property
    def begins(self) -> int:
        """The number of this run's first folder. Earlier folders belong to runs that run.resume=never has abandoned."""
        begins = self.holder.get("begins")
        return begins if isinstance(begins, int) else 0

    @property
    def folders(self) -> dict[tuple[int, str], list[str]]:
        """The objects of this run's checkpoints, committed or not, by the folder's number and the checkpoint's name."""
        found: dict[tuple[int, str], list[str]] = {}
        for name in self.objects:
            match = _CHECKPOINT.fullmatch(name)
            if match and int(match[1] or 0) >= self.begins:
                found.setdefault((int(match[1] or 0), match[2]), []).append(name)
        return found

    @property
    def checkpoints(self) -> list[StoredCheckpoint]:
        """The committed checkpoints, newest first."""
        found = [StoredCheckpoint(manifest.step_of(Path(name)) or 0, number, name) for number, name in self.folders]
        return sorted((one for one in found if f"{one.folder}/{manifest.MANIFEST}" in self.objects), reverse=True)


class Mirror:
    """A run's mirror, for a caller that holds the lock of the run's directory. Methods may raise StoreFailed."""

    def __init__(self, url: str, directory: RunDirectory) -> None:
        self.objects, self.directory = Objects(url, heeds_signals=True), directory
        self.url = self.objects.url
        self._file = directory.path / "mirror.json"

    def look(self) -> Contents:
        """Return the content of the mirror."""
        return contents_of(self.objects)

    def require_free(self, contents: Contents) -> None:
        """Raise RunLocked if another command writes to the mirror: such a command gives a sign of life within some seconds."""
        holder, sign_name = contents.holder, f"{contents.number:06d}/alive.json"
        before = read_facts(self.objects, sign_name)
        known = self.known  # a holder that worked in this directory (not in the original of a copied directory) has ended
        is_ours = "token" in holder and holder["token"] == known.get("token") and self._inode == known.get("inode")
        if not contents.number or before.get("released") or is_ours or is_alive(holder) is False:
            return
        LOGGER.info("waiting %.0f s for a sign of life of the last command that wrote to %s", _DEAD_AFTER_S, self.url)
        began = time.monotonic()
        while time.monotonic() - began < _DEAD_AFTER_S:
            if PREEMPTION.requested:
                raise Interrupted("stopped before the run's mirror was free; the same command starts the run")
            if read_facts(self.objects, sign_name) != before:
                raise self._locked(holder)
            time.sleep(0.5)

    def take(self, contents: Contents) -> Holding:
        """Claim the mirror, with the content that was last seen. Raise RunLocked if another command has claimed it since."""
        token, number = secrets.token_hex(8), contents.number + 1
        is_anew = not contents.begins or bool(self.known.get("anew"))
        holding = Holding(number, number if is_anew else contents.begins, token)
        claim = asdict(holding) | {"host": socket.gethostname(), "pid": os.getpid()} | process_identity()
        name = _claim_name(number)
        if not self.objects.create(name, json.dumps(claim).encode()):
            raise self._locked(read_facts(self.objects, name))
        if self.objects.create(name, b"{}"):
            self.objects.remove(name)
            raise StoreFailed(f"{self.url} is in a store that does not support conditional writes: it has overwritten an "
                              "object instead of refusing", is_wrong=True)  # fmt: skip
        write_atomically(self._file, json.dumps({"url": self.url, "inode": self._inode, **asdict(holding)}) + "\n")
        return holding

    def begin_anew(self) -> None:
        """Record in the directory, which is empty, that the content of the mirror must be ignored."""
        write_atomically(self._file, json.dumps({"url": self.url, "anew": True}) + "\n")

    @property
    def _inode(self) -> int:
        return self.directory.path.stat().st_ino

    @property
    def known(self) -> dict[str, Any]:
        """The directory's record of this mirror."""
        with suppress(OSError, ValueError, RecursionError):
            known = json.loads(self._file.read_text())
            if isinstance(known, dict) and known.get("url") == self.url:
                return known
        return {}

    def _locked(self, holder: dict[str, Any]) -> RunLocked:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}"
        return RunLocked(f"{self.url} is in use by {who}; wait for it, or stop it")

    def is_complete(self, contents: Contents) -> bool:
        """Return whether the last holder has uploaded everything at its end."""
        return bool(read_facts(self.objects, f"{contents.number:06d}/alive.json").get("complete")) if contents.number else False

    def is_another(self, contents: Contents) -> bool:
        """Return whether the mirror has a later start of the run than the directory (run.resume=never in another place)."""
        return bool(contents.number) and self.known.get("begins", contents.begins) < contents.begins


def contents_of(objects: Objects) -> Contents:
    """Return the content of a mirror, or of a copy of a run's directory (which has no holder)."""
    found = objects.listing()
    numbers = sorted((int(name[:6]) for name in found if re.fullmatch(r"\d{6}/claim\.json", name)), reverse=True)
    claims = (read_facts(objects, _claim_name(number)) for number in numbers)  # on a file system, a kill may cut a claim short
    return Contents(max(numbers, default=0), next(filter(None, claims), {}), found)


def read_facts(objects: Objects, name: str) -> dict[str, Any]:
    """Return the JSON in an object, or {} if the object does not exist or is damaged."""
    with suppress(ValueError, RecursionError):
        content = json.loads(objects.read(name) or b"{}")
        return content if isinstance(content, dict) else {}
    return {}


def _claim_name(number: int) -> str:
    return f"{number:06d}/claim.json"
