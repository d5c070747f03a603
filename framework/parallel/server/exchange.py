"""The synchronous server's two sides: rank 0, which adds up and gives out, and the others, which hand in and fetch.

Every rank calls the same methods of its side in the same order: `add_up` leaves in rank 0's `.grad` the sum over the
ranks; `share` returns what `compute` gives on rank 0, where alone it is called.
"""

import queue
import threading
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

from framework.distributed.world import World
from framework.parallel.server.rpc import Gradients, join, name_of, on_cpu


class Server:
    """Rank 0's side. All arithmetic happens in its own thread, where the loop calls; handlers only store and hand out.

    So no handler waits: one that asks for what is not there yet gets a future.
    """

    def __init__(self, world: World) -> None:
        self._inboxes: list[queue.SimpleQueue[Gradients | Exception]] = [queue.SimpleQueue() for _ in range(world.world_size)]
        self._timeout_s = world.timeout.total_seconds()
        self.notices = Notices(num_readers=world.world_size - 1)
        self._num_shared = 0
        _AT_RANK_0[:] = [self]  # before any other rank can call
        join(world, lost=lambda rank, error: self._inboxes[rank].put(error))

    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        # in the order of the ranks, whichever comes first: the same bits whenever the step is taken again
        for rank in range(1, len(self._inboxes)):
            for parameter, gradient in zip(parameters, self._take(rank)):
                if gradient is not None and parameter.grad is not None:
                    parameter.grad.add_(gradient.to(parameter.device))
                elif gradient is not None:
                    parameter.grad = gradient.to(parameter.device)

    def _take(self, rank: int) -> Gradients:
        try:
            taken = self._inboxes[rank].get(timeout=self._timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no gradient from rank {rank} within {self._timeout_s:g} s (launch.timeout_s)") from None
        if isinstance(taken, Exception):
            raise taken
        return taken

    def hand_in(self, gradients: Gradients, *, rank: int) -> None:
        """Keep a rank's gradients until they are added. Called by handlers."""
        self._inboxes[rank].put(gradients)

    def share(self, compute: Callable[[], list[Tensor]]) -> list[Tensor]:
        values = compute()
        self.notices.post(self._num_shared, [on_cpu(value) for value in values])
        self._num_shared += 1
        return values


class Notices:
    """Numbered values that each of the readers takes once, before or after they are there."""

    def __init__(self, *, num_readers: int) -> None:
        self._num_readers = num_readers
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Future[list[Tensor]], int]] = {}  # with the number of readers to come

    def post(self, number: int, values: list[Tensor]) -> None:
        with self._lock:
            self._entry(number)[0].set_result(values)
            self._forget_if_read(number)

    def read(self, number: int) -> "Future[list[Tensor]]":
        with self._lock:
            future, num_to_come = self._entry(number)
            self._open[number] = future, num_to_come - 1
            self._forget_if_read(number)
            return future

    def _entry(self, number: int) -> tuple["Future[list[Tensor]]", int]:
        return self._open.setdefault(number, (Future(), self._num_readers))

    def _forget_if_read(self, number: int) -> None:
        future, num_to_come = self._open[number]
        if num_to_come == 0 and future.done():
            del self._open[number]


class Client:
    """The side of every other rank."""

    def __init__(self, world: World) -> None:
        self._rank = world.rank
        self._num_shared = 0
        join(world)

    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        gradients = [None if p.grad is None else p.grad.to("cpu") for p in parameters]
        # it waits until they are there: the loop will change them
        rpc.rpc_sync(name_of(0), _hand_in, args=(gradients, self._rank))

    def share(self, compute: Callable[[], list[Tensor]]) -> list[Tensor]:
        values: list[Tensor] = rpc.rpc_sync(name_of(0), _fetch, args=(self._num_shared,))
        self._num_shared += 1
        return values


_AT_RANK_0: list[Server] = []  # rpc calls functions by name; this is where they find rank 0's side


def _hand_in(gradients: Gradients, rank: int) -> None:
    _AT_RANK_0[0].hand_in(gradients, rank=rank)


@rpc.functions.async_execution
def _fetch(number: int) -> "Future[list[Tensor]]":
    return _AT_RANK_0[0].notices.read(number)  # what was, or will be, the `number`-th thing shared
