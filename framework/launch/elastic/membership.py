"""What the nodes of an elastic run have agreed on: plain data, and the transitions between its states."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from framework.launch.failures import Failure


@dataclass
class Member:
    """A node's agent. It takes part in the round, with running workers, unless it waits for the next round."""

    host: str
    pid: int
    attempt: list[int] = field(default_factory=list)
    machine: str = ""  # nodes of one machine reach each other over loopback
    waits: bool = True


@dataclass
class Membership:
    """A round is a worker group's life: its number of nodes is fixed, and the next round begins when all nodes have left it.

    Plain data and the transitions between its states; a node's number is never used twice, and orders the ranks.
    """

    sizes: list[int]  # numbers of nodes that a round may have, ascending
    num_workers: int  # of each node
    max_restarts: int
    secret: str = ""  # by which the nodes know each other on the network
    version: int = 0  # the number of changes so far
    attempt: list[int] = field(default_factory=list)  # of a Slurm job: a newer attempt takes the place of an older one
    nodes: dict[int, Member] = field(default_factory=dict)
    num_nodes_ever: int = 0
    round: int = 0
    members: list[int] = field(default_factory=list)  # of the round, by rank, including nodes that have left it
    hosts: list[str] = field(default_factory=list)  # of the members
    verdicts: dict[int, str] = field(default_factory=dict)  # what the members have found of a hang, by node
    broken: int = 0  # the newest round that has lost a worker
    parted: int = 0  # the newest round whose nodes have lost each other
    cut: list[tuple[int, int]] = field(default_factory=list)  # pairs of nodes that do not reach each other (`Meeting.look`)
    doubtful: list[tuple[int, int]] = field(default_factory=list)  # these, and pairs that have not for some seconds
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
    def ready(self) -> list[int]:
        """The nodes with which a round could begin: the largest number of waiting nodes that all reach each other."""
        return together(self.waiting, apart=self.doubtful)

    @property
    def may_grow(self) -> bool:
        """Whether a round of all present nodes would be larger than this round."""
        return self._size_for(len(together(list(self.nodes), apart=self.doubtful))) > len(self.members)

    @property
    def may_start(self) -> bool:
        return not self.running and self._size_for(len(self.ready)) > 0

    @property
    def is_full(self) -> bool:
        return len(self.ready) >= self.sizes[-1]

    @property
    def lost_links(self) -> list[tuple[int, int]]:
        """The pairs of nodes of the round that do not reach each other any more."""
        return [pair for pair in self.cut if set(pair) <= set(self.members)]

    @property
    def is_short(self) -> bool:
        """Whether a node of the round is dead."""
        return any(number not in self.nodes for number in self.members)

    @property
    def lost_nodes(self) -> list[str]:
        """Which nodes of the round are dead, in words."""
        size, lost = self.num_workers, []
        for place, (number, host) in enumerate(zip(self.members, self.hosts)):
            if number not in self.nodes:
                ranks = f"rank {place}" if size == 1 else f"ranks {place * size} to {(place + 1) * size - 1}"
                lost.append(f"{host}, with {ranks}, was lost")
        return lost

    def restart(self, fresh: "Membership") -> None:
        """Become another attempt's. The numbers of nodes and rounds stay used: some of their files may be left."""
        vars(self).update(vars(fresh) | {"num_nodes_ever": self.num_nodes_ever, "round": self.round, "version": self.version})

    def add(self, node: Member) -> int:
        self.num_nodes_ever += 1
        self.nodes[self.num_nodes_ever] = node
        return self.num_nodes_ever

    def start_round(self) -> None:
        """Begin the next round with as many of the waiting nodes as can take part; the others continue to wait."""
        is_told = self.is_short or self.parted == self.round or self._has_failed(self.round)
        if self.broken == self.round > 0 and not is_told:
            # no process died or has an error of its own: without a count this would repeat forever
            self.note(Failure(0, "the nodes have lost each other, and no process has died", "the network"), self.round)
        if self.code is not None:
            return
        self.round += 1
        self.members = self.ready[: self._size_for(len(self.ready))]
        self.hosts, self.verdicts = [self.nodes[number].host for number in self.members], {}
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


_MOST_EXACT = 20  # nodes without some link: up to so many, every choice is compared


def together(numbers: Sequence[int], *, apart: Iterable[tuple[int, int]]) -> list[int]:
    """Return the largest set of nodes of which no two are `apart`, in order; of several such sets, that with the oldest nodes.

    Beyond some number of nodes without a link: a large one.
    """
    without: dict[int, set[int]] = {number: set() for number in numbers}
    for one, other in apart:
        if one in without and other in without:
            without[one].add(other)
            without[other].add(one)

    def largest(left: list[int]) -> list[int]:
        broken = {number: len(without[number].intersection(left)) for number in left}
        worst = max(left, key=lambda number: (broken[number], number), default=0)
        if not broken.get(worst):
            return left
        others = largest([number for number in left if number != worst])
        if sum(map(bool, broken.values())) > _MOST_EXACT:
            return others
        with_it = largest([number for number in left if number not in without[worst]])
        return max(others, with_it, key=lambda found: (len(found), [-number for number in found]))

    return largest(sorted(numbers))


MEMBERSHIP = TypeAdapter(Membership)
