"""Which nodes take part in an elastic run, and what they have agreed on: one record in a folder that all nodes share."""

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from framework.launch.failures import Failure
from framework.runtime.environment import node_name
from framework.runtime.exits import RunEnded
from framework.runtime.files import lock_file, write_atomically


@dataclass
class Member:
    """A node's agent. It takes part in the round, with running workers, unless it waits for the next round."""

    host: str
    pid: int
    attempt: list[int] = field(default_factory=list)
    waits: bool = True


@dataclass
class Membership:
    """A round is a worker group's life: its number of nodes is fixed, and the next round begins when all nodes have left it.

    Plain data and the transitions between its states; a node's number is never used twice, and orders the ranks.
    """

    sizes: list[int]  # numbers of nodes that a round may have, ascending
    num_workers: int  # of each node
    max_restarts: int
    attempt: list[int] = field(default_factory=list)  # of a Slurm job: a newer attempt takes the place of an older one
    nodes: dict[int, Member] = field(default_factory=dict)
    num_nodes_ever: int = 0
    round: int = 0
    members: list[int] = field(default_factory=list)  # of the round, by rank, including nodes that have left it
    broken: int = 0  # the newest round that has lost a worker
    regroups: int = 0  # the newest round that was asked to end after its step, so that more nodes can take part
    stops: bool = False  # a person has asked the run to stop
    failures: list[tuple[int, Failure]] = field(default_factory=list)  # by round; a lost node does not count
    code: int | None = None  # how the run has ended
    error: str | None = None

    @property
    def waiting(self) -> list[int]:
        return sorted(number for number, node in self.nodes.items() if node.waits and node.attempt == self.attempt)

    @property
    def running(self) -> list[int]:
        return [number for number, node in self.nodes.items() if not node.waits]

    @property
    def may_grow(self) -> bool:
        """Whether a round of all present nodes would be larger than this round."""
        return self._size_for(len(self.nodes)) > len(self.members)

    @property
    def may_start(self) -> bool:
        return not self.running and self._size_for(len(self.waiting)) > 0

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= self.sizes[-1]

    @property
    def is_short(self) -> bool:
        """Whether a node of the round is dead."""
        return any(number not in self.nodes for number in self.members)

    def restart(self, fresh: "Membership") -> None:
        """Become another attempt's. The numbers of nodes and rounds stay used: some of their files may be left."""
        vars(self).update(vars(fresh) | {"num_nodes_ever": self.num_nodes_ever, "round": self.round})

    def add(self, node: Member) -> int:
        self.num_nodes_ever += 1
        self.nodes[self.num_nodes_ever] = node
        return self.num_nodes_ever

    def start_round(self) -> None:
        """Begin the next round with as many of the waiting nodes as can take part; the others continue to wait."""
        if self.broken == self.round > 0 and not self.is_short and not self._has_failed(self.round):
            # no process died or has an error of its own: without a count this would repeat forever
            self.note(Failure(0, "the nodes have lost each other, and no process has died", "the network"), self.round)
        if self.code is not None:
            return
        self.round += 1
        self.members = self.waiting[: self._size_for(len(self.waiting))]
        for number in self.members:
            self.nodes[number].waits = False

    def note(self, failure: Failure, round: int) -> int:
        """Count one failure a round; the last one allowed, or a repeated one, ends the run. Returns the number of failures."""
        if not self._has_failed(round):
            before = self.failures[-1][1] if self.failures else None
            self.failures.append((round, failure))
            is_repeated = before is not None and (before.error, before.where) == (failure.error, failure.where)
            if is_repeated or len(self.failures) > self.max_restarts:
                self.end(1, error=f"rank {failure.rank}: {failure.error}")
        return len(self.failures)

    def end(self, code: int, *, error: str | None = None) -> None:
        """Record how the run has ended, unless that is recorded."""
        if self.code is None:
            self.code, self.error = code, error

    def _has_failed(self, round: int) -> bool:
        return any(round == number for number, _ in self.failures)

    def _size_for(self, count: int) -> int:
        return max((size for size in self.sizes if size <= count), default=0)


_BEAT_S = 1.0
_DEAD_AFTER_S = 8.0  # without a beat


MEMBERSHIP = TypeAdapter(Membership)


class Superseded(RunEnded):
    """A newer attempt of the job has the run: this attempt was considered lost."""


class Meeting:
    """One agent's access to the record: one file, which all agents read, and which one at a time changes under a lock.

    Nothing listens on a port, no process hosts it, and a change is a rename: any process may be killed at any moment.
    A node lives as long as its file's time changes; no two machines' clocks are compared.
    """

    def __init__(self, folder: Path, *, sizes: list[int], num_workers: int, max_restarts: int, attempt: list[int]) -> None:
        self.folder = folder
        self.number = 0  # this node's
        self._file = folder / "membership.json"
        self._new = lambda: Membership(sizes, num_workers, max_restarts, attempt)
        self._node = Member(node_name(), os.getpid(), attempt)
        self._came = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}  # of each node: its last beat, and when this process saw it
        self._left = threading.Event()

    def enter(self) -> bool:
        """Try to join the nodes that wait; False while an earlier attempt, which has ended, is still being removed.

        ValueError where the other nodes have another command; Superseded as from `look`.
        """
        with self.change() as membership:
            if not membership.nodes:  # no node is left of an earlier attempt
                membership.restart(self._new())
                for path in self.folder.iterdir():
                    if path.name != "lock":
                        path.unlink()
            if membership.code is not None or not self._is_of_one_command(membership):
                return False
            if membership.attempt != self._node.attempt:  # ours is newer, and begins when the older nodes have left
                membership.attempt, membership.stops = self._node.attempt, False
            self.number = membership.add(self._node)
            self._beats(self.number).touch()
        threading.Thread(target=self._keep_beating, name="beat", daemon=True).start()
        return True

    def _is_of_one_command(self, membership: Membership) -> bool:
        mine = self._new()
        pairs = {"num_workers": (mine.num_workers, membership.num_workers), "sizes": (mine.sizes, membership.sizes)}
        differing = [f"{name} {here} here and {there} there" for name, (here, there) in pairs.items() if here != there]
        if differing and time.monotonic() - self._came > 2 * _DEAD_AFTER_S:  # before, the other nodes may be dead
            raise ValueError(f"another command than on the run's other nodes: {'; '.join(differing)}")
        return not differing

    def look(self) -> Membership:
        """Return the present record, without the nodes that are dead by now. Superseded if it is a newer attempt's."""
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
        return membership

    @contextmanager
    def change(self) -> Iterator[Membership]:
        """Yield the record; only this process can change it meanwhile."""
        with self._locked():
            membership = self.look()
            yield membership
            self._write(membership)

    def _write(self, membership: Membership) -> None:
        write_atomically(self._file, MEMBERSHIP.dump_json(membership, indent=1).decode() + "\n")

    def wait_for_next(self, membership: Membership) -> None:
        """Become a node that waits, even if the others considered this node dead. Within `change`."""
        membership.nodes[self.number] = self._node

    def clear(self, *, before: int) -> None:
        """Remove the files that the workers of earlier rounds have left here. Within `change`."""
        for path in self.folder.iterdir():
            numbered = re.fullmatch(r"(store|start|failure)_(\d+).*", path.name)
            if numbered is not None and int(numbered[2]) < before:
                path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Leave; the last node removes the folder. Errors of the disk do not matter: this node is soon considered dead."""
        self._left.set()
        with suppress(OSError), self._locked():
            membership = self._read()
            membership.nodes.pop(self.number, None)
            if membership.nodes:
                self._write(membership)
                self._beats(self.number).unlink(missing_ok=True)
            else:
                shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = None
        while descriptor is None:  # the last node of an earlier attempt may remove the file that we wait for
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                descriptor = lock_file(self.folder / "lock", waits=True)
        try:
            yield
        finally:
            os.close(descriptor)

    def _is_dead(self, number: int) -> bool:
        if number == self.number:
            return False
        try:
            with open(self._beats(number)) as file:  # opened, so that a network file system asks the server
                beat = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            beat = 0
        now = time.monotonic()
        if self._seen.get(number, (None, 0.0))[0] != beat:
            self._seen[number] = beat, now
        return now - self._seen[number][1] > _DEAD_AFTER_S

    def _beats(self, number: int) -> Path:
        return self.folder / f"node_{number}"

    def _keep_beating(self) -> None:
        while not self._left.wait(_BEAT_S):
            with suppress(OSError):  # a missed beat is not a lost node
                self._beats(self.number).touch()
