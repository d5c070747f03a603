"""Which nodes take part in an elastic run, and what they have agreed on: the one record that all nodes share."""

import dataclasses
import json
from dataclasses import dataclass, field

from framework.launch.failures import Failure


@dataclass
class Node:
    """A node's agent. It is in the round, with workers that run, unless it waits for the next round."""

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
    nodes: dict[int, Node] = field(default_factory=dict)
    num_nodes_ever: int = 0
    round: int = 0
    members: list[int] = field(default_factory=list)  # of the round, by rank, including nodes that have left it
    broken: int = 0  # the newest round that has lost a worker
    regroups: int = 0  # the newest round that was asked to end after its step, so that more nodes can take part
    stops: bool = False  # a person has asked the run to stop
    failures: list[tuple[int, Failure]] = field(default_factory=list)  # by round; a lost node does not count
    code: int | None = None  # how the run has ended
    error: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Membership":
        plain = json.loads(text)
        plain["nodes"] = {int(number): Node(**node) for number, node in plain["nodes"].items()}
        plain["failures"] = [(round, Failure(**failure)) for round, failure in plain["failures"]]
        return cls(**plain)

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

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

    def add(self, node: Node) -> int:
        self.num_nodes_ever += 1
        self.nodes[self.num_nodes_ever] = node
        return self.num_nodes_ever

    def start_round(self) -> None:
        """Begin the next round with as many of the waiting nodes as can take part; the others go on waiting."""
        if self.broken == self.round > 0 and not self.is_short and not self._has_failed(self.round):
            # no process died or has an error of its own: without a count this would go on forever
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
