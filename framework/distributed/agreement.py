"""What the ranks agree on among themselves: stop flags, checkpoint plans, sums of metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.runtime.exits import DiskFailed


@dataclass
class Agreement:
    """Collectives over a process group of their own, so that they never pair with a gradient's.

    The group is a gloo group; if training uses MPI, it is an MPI group, since a cluster may let nothing else through. In a
    world of one process there is no group, and each call returns at once.
    """

    group: dist.ProcessGroup | None
    every: int = field(default=1, init=False)  # calls of `any_flags`; the same on all ranks
    _calls: int = field(default=0, init=False)  # since the ranks were asked
    _flags: tuple[dist.Work, Tensor] | None = field(default=None, init=False)

    @property
    def allows_threads(self) -> bool:
        """Return whether a thread may run collectives while others do: an MPI need not allow that."""
        return self.group is None or dist.get_backend(self.group) == "gloo"

    def send(self, value: Tensor, *, to: int) -> None:
        """Send a CPU tensor to one rank, which calls `receive`."""
        dist.send(value, dst=to, group=self.group)

    def receive(self, value: Tensor, *, source: int) -> Tensor:
        """Overwrite a CPU tensor by what `source` sends, and return it."""
        dist.recv(value, src=source, group=self.group)
        return value

    def sum(self, values: Tensor) -> Tensor:
        """Sum a CPU tensor over all ranks, in place. Collective."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank. Collective."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.group.size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def dealt(self, value: Any, deal: Callable[[list[Any]], list[Any]]) -> Any:
        """Return this rank's item of what `deal` makes of every rank's `value`, in rank order, on rank 0 alone. Collective.

        No other rank has more in memory than what it gives and gets.
        """
        if self.group is None:
            return deal([value])[0]
        is_first, size = self.group.rank() == 0, self.group.size()
        values: list[Any] | None = [None] * size if is_first else None
        dist.gather_object(value, values, dst=0, group=self.group)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, deal(values) if values is not None else None, src=0, group=self.group)
        return mine[0]

    def from_rank_0(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank. Collective."""
        return self.gather(value)[0]

    def together(self, action: Callable[[], Any], *, what: str, rank_0_only: bool = False) -> list[Any]:
        """Run `action`, which uses the disk, and return every rank's result: no rank is left waiting. Collective.

        DiskFailed on every rank, saying `what` could not be done, where an OSError hits one of them.
        """
        result, fault = None, None
        if not rank_0_only or self.group is None or self.group.rank() == 0:
            try:
                result = action()
            except OSError as error:
                fault = " ".join(str(error).split())
        outcomes = self.gather((result, fault))
        for rank, (_, problem) in enumerate(outcomes):
            if problem is not None:
                raise DiskFailed(f"{what}: rank {rank}: {problem}")
        return [value for value, _ in outcomes]

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def any_flags(self, *flags: bool, now: bool = True) -> list[bool]:
        """Return for each flag whether any rank had raised it at the PREVIOUS call: the same on all ranks. Collective.

        Without `now`, only every so many calls (`every`) ask the others, and what the calls between are given is not told.
        The reduction of one call runs during the step that follows it, so agreeing costs no waiting.
        """
        if self.group is None:
            return list(flags)
        before = self.finish() or [False] * len(flags)
        self._calls += 1
        if now or self._calls >= self.every:
            self._calls = 0
            mine = torch.tensor(flags, dtype=torch.int64)
            self._flags = dist.all_reduce(mine, group=self.group, async_op=True), mine
        return before

    def take_pace(self, *, call_s: float) -> None:
        """Let `any_flags` ask ten times a second where a call comes every `call_s` seconds: the same number on all ranks.

        Zero: it is not known, and nothing changes.
        """
        if call_s:
            self.every = max(1, min(1000, int(0.1 / call_s)))

    def finish(self) -> list[bool]:
        """Wait for the flags of the latest call of `any_flags`, and return which are raised; none if it has not been called."""
        if self._flags is None:
            return []
        (work, counts), self._flags = self._flags, None
        work.wait()
        return [bool(count) for count in counts.tolist()]
