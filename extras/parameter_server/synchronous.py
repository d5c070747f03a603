"""The synchronous parameter server: rank 0 adds up the ranks' gradients and takes one step. Equal to one process."""

import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from extras.rpc.rpc import Gradients, call_remote, gradients_of, join_rpc, new_server, on_cpu, serve
from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.optim.optimizers import BuildOptimizer, Trainable, stand_in


class Synchronous(Engine):
    """An Engine equal to one process: one optimizer step, on rank 0, with the sum of all ranks' gradients.

    Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server", in its sequential mode.
    """

    def __init__(self, model: nn.Module, *, forward: Forward, mesh: DeviceMesh, world: World) -> None:
        super().__init__(
            module=model,
            forward=forward,
            mesh=mesh,
            dp_rank=world.rank,
            dp_size=world.world_size,
            broadcast=world.broadcast,
            finish=self._add_up,
            warm_up=self._pull,
            make_optimizer=self._on_rank_0,
        )
        self._device = world.device
        self._held = [p for p in nn.Module.parameters(model) if p.requires_grad]
        self._side = Server(world) if world.rank == 0 else Client(world)

    def _add_up(self) -> None:
        """Give every rank the sum of the gradients: a part of the loop may read them on any rank."""
        self._side.add_up(self._held)
        summed = self._side.share(lambda: [parameter.grad for parameter in self._held])
        for parameter, gradient in zip(self._held, summed):
            parameter.grad = None if gradient is None else gradient.to(self._device)

    def _on_rank_0(self, build: BuildOptimizer, trained: list[Trainable]) -> torch.optim.Optimizer:
        optimizer = build(trained if self.dp_rank == 0 else stand_in(self._device))
        # immediately, not before the next forward pass: an average of the weights reads the weights after each step
        optimizer.register_step_post_hook(lambda *_: self._pull())
        return optimizer

    @torch.no_grad()
    def _pull(self) -> None:
        for parameter, value in zip(self._held, self._side.share(lambda: [*self._held])):
            assert value is not None
            parameter.copy_(value)


# Both classes have the same methods, and every rank calls them in the same order. `add_up` puts the sum over the ranks into
# rank 0's `.grad`. `share` returns the result of `compute` on rank 0; only rank 0 calls `compute`.


class Server:
    """Rank 0's side. The thread of the training loop does all arithmetic; RPC handlers only store and return values.

    So no handler waits: a request for a value that does not exist yet gets a future.
    """

    def __init__(self, world: World) -> None:
        self._inboxes: list[queue.SimpleQueue[Gradients | Exception]] = [queue.SimpleQueue() for _ in range(world.world_size)]
        self._timeout_s = world.timeout.total_seconds()
        self._notices = Notices(num_readers=world.world_size - 1)
        self.read = self._notices.read
        self._num_shared = 0
        serve(self, number=new_server())  # before any other rank can call
        join_rpc(world, lost=lambda rank, error: self._inboxes[rank].put(error))

    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        # in the order of the ranks, not of arrival, so that the same step has the same bits again
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

    def hand_in(self, gradients: Gradients, rank: int) -> None:
        """Store a rank's gradients until they are added. Handlers call this."""
        self._inboxes[rank].put(gradients)

    def share(self, compute: Callable[[], Gradients]) -> Gradients:
        values = compute()
        self._notices.post(self._num_shared, [None if value is None else on_cpu(value) for value in values])
        self._num_shared += 1
        return values


class Notices:
    """Numbered values that each of the readers takes once; a reader may ask before the values exist."""

    def __init__(self, *, num_readers: int) -> None:
        self._num_readers = num_readers
        self._lock = threading.Lock()
        self._open: defaultdict[int, Future[Gradients]] = defaultdict(Future)
        self._num_reads: Counter[int] = Counter()

    def post(self, number: int, values: Gradients) -> None:
        with self._lock:
            self._open[number].set_result(values)
            self._forget_if_read(number)

    def read(self, number: int) -> "Future[Gradients]":
        with self._lock:
            future = self._open[number]
            self._num_reads[number] += 1
            self._forget_if_read(number)
            return future

    def _forget_if_read(self, number: int) -> None:
        if self._num_reads[number] == self._num_readers and self._open[number].done():
            del self._open[number], self._num_reads[number]


class Client:
    """The side of every other rank."""

    def __init__(self, world: World) -> None:
        self._rank, self._server = world.rank, new_server()
        self._num_shared = 0
        join_rpc(world)

    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        # wait until the gradients have arrived, because the loop will change them
        call_remote(self._server, "hand_in", gradients_of(parameters), self._rank)

    def share(self, compute: Callable[[], Gradients]) -> Gradients:
        values: Gradients = call_remote(self._server, "read", self._num_shared)
        self._num_shared += 1
        return values
