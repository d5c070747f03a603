"""The agreement of the nodes of an elastic run: one record in a folder that all nodes share, and the nodes' signs of life."""

import itertools
import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from framework.launch.elastic.links import Links
from framework.launch.elastic.membership import MEMBERSHIP, Member, Membership
from framework.launch.elastic.signs import Signs
from framework.runtime.exits import RunEnded
from framework.runtime.files import write_atomically
from framework.runtime.lock import is_alive, process_identity

Returned = TypeVar("Returned")

_BLOCK = 1024
_DEAD_AFTER_S = 8.0  # without a sign of life
_POLL_S = 0.05
_NUM_CLAIMS = 100  # how many claims are kept: a network file system may show the record of some seconds, and some changes, ago


class Superseded(RunEnded):
    """A newer attempt of the job has the run, because this attempt was considered lost."""


class Meeting:
    """One agent's access to the record: a file that all agents read, and that one agent at a time changes.

    No process serves the record, and a change is a rename: any process may be killed or frozen at any moment. The agent that
    creates a file first makes the next change. This works on any file system, unlike locks. A node lives as long as its file
    changes. The clocks of two machines are never compared.
    """

    def __init__(
        self, folder: Path, *, node: Member, links: Links, sizes: list[int], num_workers: int, max_restarts: int
    ) -> None:
        self.folder = folder
        self.number = 0  # this node's number
        self._file = folder / "membership.json"
        self._new = lambda: Membership(sizes, num_workers, max_restarts, secrets.token_hex(16), attempt=node.attempt)
        self._node, self._links = node, links
        self._came = time.monotonic()
        self._signs = Signs(folder, links)
        self._claims: dict[Path, float] = {}  # claims of other agents, and when this process first saw each
        self._left = threading.Event()

    def enter(self) -> bool:
        """Try to join the waiting nodes. Return False while an earlier attempt, which has ended, is still being removed.

        Raise ValueError if the other nodes have another command, and Superseded as `look` does.
        """

        def join(membership: Membership) -> bool:
            if not membership.nodes:  # no node of an earlier attempt is left
                membership.restart(self._new())
                for path in self.folder.iterdir():
                    if path != self._file and not path.name.startswith("change_"):
                        path.unlink(missing_ok=True)
            if membership.code is not None or not self._is_of_one_command(membership):
                return False
            if membership.attempt != self._node.attempt:  # this attempt is newer, and starts when the older nodes have left
                membership.attempt, membership.stops = self._node.attempt, False
            self.number = membership.add(self._node)
            self._signs.give(self.number, 0)
            return True

        if not self.change(join):
            return False
        keep = partial(self._signs.keep_giving, self.number, until=self._left)
        threading.Thread(target=keep, name="beat", daemon=True).start()
        return True

    def _is_of_one_command(self, membership: Membership) -> bool:
        mine = self._new()
        pairs = {"num_workers": (mine.num_workers, membership.num_workers), "sizes": (mine.sizes, membership.sizes)}
        differing = [f"{name} {here} here and {there} there" for name, (here, there) in pairs.items() if here != there]
        if differing and time.monotonic() - self._came > 2 * _DEAD_AFTER_S:  # before this time, the other nodes may be dead
            raise ValueError(f"another command than on the run's other nodes: {'; '.join(differing)}")
        return not differing

    def look(self) -> Membership:
        """Return the present record without the dead nodes. Raise Superseded if it belongs to a newer attempt."""
        membership = self._read()
        if membership.attempt > self._node.attempt:
            raise Superseded(f"a newer attempt of this job, or a newer job, has the run in {self.folder}")
        return membership

    def _read(self) -> Membership:
        try:
            membership = MEMBERSHIP.validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return self._new()
        for number in [number for number in membership.nodes if self._is_dead(number)]:
            del membership.nodes[number]
        signs = {number: self._signs.of(number) for number in membership.nodes}
        pairs = list(itertools.combinations(sorted(signs), 2))
        membership.cut = [(a, b) for a, b in pairs if b not in signs[a].reaches or a not in signs[b].reaches]
        membership.doubtful = [(a, b) for a, b in pairs if b not in signs[a].hears or a not in signs[b].hears]
        addresses = {number: sign.addresses for number, sign in signs.items()}
        self._links.meet(addresses, number=self.number, secret=membership.secret)
        return membership

    def change(self, action: Callable[[Membership], Returned]) -> Returned:
        """Change the record by `action`, and return the action's result. If others change it first, call `action` again."""
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            membership = self.look()
            try:
                if (claim := self._claim(membership.version)) is None:
                    time.sleep(_POLL_S)
                    continue
                try:
                    result = action(membership)
                    membership.version += 1
                    if self._next_claim(claim).exists():  # this process was frozen for so long that another agent has continued
                        continue
                    write_atomically(self._file, MEMBERSHIP.dump_json(membership, indent=1).decode() + "\n")
                    self._write_claim(claim, is_done=True)
                except BaseException:
                    claim.unlink(missing_ok=True)
                    raise
                return result
            except FileNotFoundError:  # the last node of an earlier attempt has removed the folder
                time.sleep(_POLL_S)

    def _claim(self, version: int) -> Path | None:
        """Claim the next change of the present record. Return None while another node's claim may still lead to a change.

        A claim stays, so that nobody can repeat a finished change. If a node is killed or frozen before its change, the next
        node claims after it.
        """
        path = self.folder / f"change_{version}_0"
        while True:
            try:
                path.touch(exist_ok=False)
                self._write_claim(path)
                return path
            except FileExistsError:
                if not self._is_abandoned(path):
                    return None
            path = self._next_claim(path)

    def _write_claim(self, path: Path, *, is_done: bool = False) -> None:
        path.write_text(json.dumps(process_identity() | {"is_done": is_done}).ljust(_BLOCK))

    def _next_claim(self, claim: Path) -> Path:
        change, _, number = claim.name.rpartition("_")
        return claim.with_name(f"{change}_{int(number) + 1}")

    def _is_abandoned(self, claim: Path) -> bool:
        holder, now = dict[str, Any](), time.monotonic()
        with suppress(OSError, ValueError):
            holder = json.loads(claim.read_text())
        silent_s = now - self._claims.setdefault(claim, now)
        return not holder.get("is_done") and (silent_s > _DEAD_AFTER_S or is_alive(holder) is False)

    def wait_for_next(self, membership: Membership) -> None:
        """Become a waiting node, even if the others considered this node dead. Call this within `change`."""
        membership.nodes[self.number] = self._node

    def clear(self, membership: Membership) -> None:
        """Remove the files of the workers of earlier rounds, and old claims."""
        ends = {"change": membership.version - _NUM_CLAIMS}
        for path in self.folder.iterdir():
            numbered = re.fullmatch(r"(store|failure|change)_(\d+).*", path.name)
            if numbered is not None and int(numbered[2]) < ends.get(numbered[1], membership.round):
                path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Leave. The last node removes the folder. Disk errors do not matter: this node is soon considered dead."""
        self._left.set()

        def go(membership: Membership) -> None:
            membership.nodes.pop(self.number, None)
            self._signs.path(self.number).unlink(missing_ok=True)
            if not membership.nodes:  # rename it: another node may be joining
                trash = self.folder.rename(self.folder.with_name(f"{self.folder.name}.{secrets.token_hex(8)}"))
                shutil.rmtree(trash, ignore_errors=True)
                raise _Removed

        with suppress(OSError, _Removed, Superseded):
            self.change(go)

    def _is_dead(self, number: int) -> bool:
        return number != self.number and self._signs.silent_s(number) > _DEAD_AFTER_S

    def announce(self, round: int, address: tuple[str, int]) -> None:
        """Publish the address of a round's store to the round's nodes."""
        write_atomically(self._store_of(round), json.dumps(address))

    def announced(self, round: int) -> tuple[str, int] | None:
        """Return the address of a round's store, or None if it is not published yet."""
        try:
            host, port = json.loads(self._store_of(round).read_text())
        except FileNotFoundError:
            return None
        return host, port

    def _store_of(self, round: int) -> Path:
        return self.folder / f"store_{round}.json"

    def addresses(self, number: int) -> list[tuple[str, int]]:
        """Return the addresses on which a node listens."""
        return self._signs.of(number).addresses


class _Removed(Exception):
    """The record does not exist any more, and must not be written again."""
