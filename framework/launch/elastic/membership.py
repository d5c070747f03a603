"""The agreement of the nodes of an elastic run: plain data, and the transitions between its states."""

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
    machine: str = ""  # nodes on the same machine reach each other over loopback
    waits: bool = True


@dataclass
class Membership:
    """The nodes of a run. A round is the life of a worker group.

    Its number of nodes is fixed, and the next round starts when all nodes have left it. The data are plain; a node's number is
    never used twice, and decides the order of the ranks.
    """

    sizes: list[int]  # the allowed numbers of nodes in a round, ascending
    num_workers: int  # per node
    max_restarts: int
    secret: str = ""  # with it, the nodes recognise each other on the network
    version: int = 0  # the number of changes so far
    attempt: list[int] = field(default_factory=list)  # of a Slurm job: a newer attempt replaces an older attempt
    nodes: dict[int, Member] = field(default_factory=dict)
    num_nodes_ever: int = 0
    round: int = 0
    members: list[int] = field(default_factory=list)  # of the round, by rank, including nodes that have left it
    hosts: list[str] = field(default_factory=list)  # hosts of the members
    verdicts: dict[int, str] = field(default_factory=dict)  # the members' verdicts on a hang, by node
    broken: int = 0  # the newest round that has lost a worker
    parted: int = 0  # the newest round with nodes that have lost each other
    cut: list[tuple[int, int]] = field(default_factory=list)  # pairs of nodes that do not reach each other (`Meeting.look`)
    doubtful: list[tuple[int, int]] = field(default_factory=list)  # these pairs, and pairs without contact for some seconds
    regroups: int = 0  # the newest round that must end after its step, so that more nodes can take part
    stops: bool = False  # a person has stopped the run
    failures: list[tuple[int, Failure]] = field(default_factory=list)  # by round; a lost node does not count
    code: int | None = None  # the exit code, if the run has ended
    error: str | None = None

    @property
    def waiting(self) -> list[int]:
        return sorted(number for number, node in self.nodes.items() if node.waits and node.attempt == self.attempt)

    @property
    def running(self) -> list[int]:
        return [number for number, node in self.nodes.items() if not node.waits]

    @property
    def ready(self) -> list[int]:
        """The nodes with which a round could start: the largest set of waiting nodes that all reach each other."""
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
        """The pairs of nodes in the round that do not reach each other any more."""
        return [pair for pair in self.cut if set(pair) <= set(self.members)]

    @property
    def is_short(self) -> bool:
        """Whether a node of the round is dead."""
        return any(number not in self.nodes for number in self.members)

    @property
    def lost_nodes(self) -> list[str]:
        """The dead nodes of the round, in words."""
        size, lost = self.num_workers, []
        for place, (number, host) in enumerate(zip(self.members, self.hosts)):
            if number not in self.nodes:
                ranks = f"rank {place}" if size == 1 else f"ranks {place * size} to {(place + 1) * size - 1}"
                lost.append(f"{host}, with {ranks}, was lost")
        return lost

    def restart(self, fresh: "Membership") -> None:
        """Change to another attempt. Numbers of nodes and rounds are not used again: files of them may still exist."""
        vars(self).update(vars(fresh) | {"num_nodes_ever": self.num_nodes_ever, "round": self.round, "version": self.version})

    def add(self, node: Member) -> int:
        self.num_nodes_ever += 1
        self.nodes[self.num_nodes_ever] = node
        return self.num_nodes_ever

    def start_round(self) -> None:
        """Start the next round with as many waiting nodes as possible. The other nodes continue to wait."""
        is_told = self.is_short or self.parted == self.round or self._has_failed(self.round)
        if self.broken == self.round > 0 and not is_told:
            # no process died or has an error; without a count, this would repeat forever
            self.note(Failure(0, "the nodes lost their connection, and no process died", "the network"), self.round)
        if self.code is not None:
            return
        self.round += 1
        self.members = self.ready[: self._size_for(len(self.ready))]
        self.hosts, self.verdicts = [self.nodes[number].host for number in self.members], {}
        for number in self.members:
            self.nodes[number].waits = False

    def note(self, failure: Failure, round: int) -> int:
        """Count one failure per round, and return the count. The last allowed failure, or a repeated failure, ends the run."""
        if not self._has_failed(round):
            before = self.failures[-1][1] if self.failures else None
            self.failures.append((round, failure))
            is_repeated = before is not None and (before.error, before.where) == (failure.error, failure.where)
            if is_repeated or len(self.failures) > self.max_restarts:
                self.end(1, error=f"rank {failure.rank}: {failure.error}")
        return len(self.failures)

    def end(self, code: int, *, error: str | None = None) -> None:
        """Record how the run has ended, unless it is recorded already."""
        if self.code is None:
            self.code, self.error = code, error

    def _has_failed(self, round: int) -> bool:
        return any(round == number for number, _ in self.failures)

    def _size_for(self, count: int) -> int:
        return max((size for size in self.sizes if size <= count), default=0)


_MOST_EXACT = 20  # nodes without some link: up to this number, all choices are compared


def together(numbers: Sequence[int], *, apart: Iterable[tuple[int, int]]) -> list[int]:
    """Return the largest set of nodes of which no two are `apart`, in order. Of equal sets, take that with the oldest nodes.

    If many nodes lack a link, the set is large, but maybe not the largest.
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
