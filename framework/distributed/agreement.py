"""What the ranks agree on: stop flags, checkpoint plans, sums of metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from framework.runtime.exits import DiskFailed
from framework.runtime.plain import Invalid

_Result = TypeVar("_Result")


@dataclass
class Agreement:
    """Collectives over a separate process group, so that they never pair with a gradient's collectives.

    The group is a gloo group. In a world of one process there is no group, and each call returns immediately.
    """

    group: dist.ProcessGroup | None
    every: int = field(default=1, init=False)  # how many calls of `any_flags` make one reduction; the same on all ranks
    _calls: int = field(default=0, init=False)  # since the latest reduction
    _flags: tuple[dist.Work, Tensor] | None = field(default=None, init=False)

    def sum(self, values: Tensor) -> Tensor:
        """Sum a CPU tensor over all ranks, in place. Collective."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank. Collective.

        Use it for small values: the size of the result grows with the number of ranks. See `distinct` and `to_rank_0`.
        """
        values: list[Any] = self.from_rank_0(self.to_rank_0(value))
        return values

    def distinct(self, value: Any) -> dict[int, Any]:
        """Return the different values of the ranks, on every rank. The key of a value is the first rank that has the value.

        Collective. The result is in rank order. Values are plain data without sets; their texts are compared, and
        the numbers of arrays and tensors. If all values are equal, the ranks exchange 32 bytes each.
        """
        return self.judged(value, lambda found: found)

    def judged(self, value: Any, judge: Callable[[dict[int, Any]], _Result]) -> _Result:
        """Return the result of `judge` for the values that `distinct` would return, on every rank. Collective.

        If the ranks differ, the other ranks receive only the result, or the error.
        """
        if self.group is None or self._is_same(exact_text(value)):
            return judge({0: value})
        firsts: dict[str, int] = {}
        values = self.to_rank_0(value)
        for rank, theirs in enumerate(values):
            firsts.setdefault(exact_text(theirs), rank)
        return self.on_rank_0(lambda: judge({rank: values[rank] for rank in firsts.values()}))

    def _is_same(self, text: str) -> bool:
        digest = torch.frombuffer(bytearray(blake2b(text.encode(), digest_size=16).digest()), dtype=torch.int64)
        least, most = self._reduced(torch.cat([~digest, digest]), dist.ReduceOp.MAX).split(2)  # ~ reverses the order
        return torch.equal(~least, most)

    def to_rank_0(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on rank 0. Return [] on the other ranks. Collective."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.group.size() if self.group.rank() == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def scatter_plan(self, value: Any, deal: Callable[[list[Any]], list[Any]]) -> Any:
        """Return this rank's item of the result of `deal`, which rank 0 calls with every rank's `value`, in rank order.

        Collective. The other ranks have only their own value and their own item in memory.
        """
        if self.group is None:
            return deal([value])[0]
        values = self.to_rank_0(value)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, deal(values) if values else None, src=0, group=self.group)
        return mine[0]

    def from_rank_0(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank. Collective. Rank 0 does not wait for the others."""
        box = [value]
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def on_rank_0(self, action: Callable[[], _Result], *, what: str = "") -> _Result:
        """Run `action` on rank 0 only. Return its result, or raise its error, on every rank. Collective.

        With `what`, the action uses the disk: OSError and Invalid become DiskFailed, with a message that `what` failed. Rank 0
        does not wait for the others.
        """
        result, fault = None, None
        if self.group is None or self.group.rank() == 0:
            try:
                result = action()
            except Exception as error:  # raised below, on every rank
                is_of_disk = what and isinstance(error, (OSError, Invalid))
                fault = DiskFailed(f"{what}: rank 0: {_line(error)}") if is_of_disk else error
        result, fault = self.from_rank_0((result, fault))
        if fault is not None:
            raise fault
        return result  # type: ignore[return-value]  # the result of rank 0

    def all_or_fail(self, action: Callable[[], _Result], *, what: str) -> _Result:
        """Run `action`, which uses the disk, on every rank, and return this rank's result when all ranks are done. Collective.

        If `action` raises OSError or Invalid on any rank, raise DiskFailed on every rank; its message says that `what` failed.
        """
        result, fault = None, None
        try:
            result = action()
        except (OSError, Invalid) as error:
            fault = _line(error)
        for rank, problem in self.distinct(fault).items():
            if problem is not None:
                raise DiskFailed(f"{what}: rank {rank}: {problem}")
        return result  # type: ignore[return-value]  # without a fault there is a result

    def _reduced(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, op=operation, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait until every rank has called this. Collective."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def any_flags(self, *flags: bool, now: bool = True) -> list[bool]:
        """Return for each flag whether any rank had set the flag at the PREVIOUS call: the same on all ranks. Collective.

        Without `now`, only one of `every` calls asks the other ranks; the flags of the calls in between are not sent. The
        reduction of one call runs during the next step, so an agreement costs no waiting time.
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
        """Make `any_flags` ask ten times a second, if a call comes every `call_s` seconds. `call_s` is the same on all ranks.

        Zero means that the time is not known; then nothing changes.
        """
        if call_s:
            self.every = max(1, min(1000, int(0.1 / call_s)))

    def finish(self) -> list[bool]:
        """Wait for the flags of the latest call of `any_flags`, and return them. Return [] if there was no call."""
        if self._flags is None:
            return []
        (work, counts), self._flags = self._flags, None
        work.wait()
        return [bool(count) for count in counts.tolist()]


def exact_text(value: Any) -> str:
    """Return the text of plain data, with all numbers: the text of an array or a tensor leaves numbers and digits out."""
    text = repr(value)
    return repr(_listed(value)) if "array(" in text or "tensor(" in text else text


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_listed(item) for item in value]
    return (str(value.dtype), value.tolist()) if isinstance(value, (np.ndarray, Tensor)) else value


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
