"""A process group of torch.distributed over mpi4py, for builds of torch that have no MPI backend."""

# mypy: disable-error-code="override"
# torch's stub gives each method a second form, for torch's own callers; a group in Python does not get these calls

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from extras.mpi import mpi
from extras.mpi.buffers import Reduction, carried, check_count, counts_of, joined, sizes
from extras.mpi.launcher import Mpirun

if mpi.is_missing():
    raise ImportError(f"mpi4py is not installed: {mpi.INSTALL}")


class PendingOperation(dist.Work):
    """Operations that MPI has started. They advance when this process is inside MPI, and end in `wait` at the latest."""

    _unfinished: set["PendingOperation"] = set()  # MPI uses the memory of these operations, even if nobody waits for them

    def __init__(self, what: str, *, timeout: timedelta, result: list[Tensor]) -> None:
        super().__init__()
        self._what, self._timeout, self._result = what, timeout, result
        self._requests: list[Any] = []
        self._used: list[Tensor] = []
        self._last: list[Callable[[], object]] = []
        self._unfinished.add(self)

    def add(self, request: Any) -> "PendingOperation":
        self._requests.append(request)
        return self

    def at_end(self, act: Callable[[], object]) -> None:
        self._last.append(act)

    # --- MPI's buffers; the operation keeps their memory until it has ended

    def sent(self, tensor: Tensor, counts: list[int] | None = None) -> list[Any]:
        """Return a buffer with the elements of `tensor`. `counts`: elements for each rank."""
        return carried(self.keep(tensor.detach().contiguous()), counts)

    def sent_parts(self, parts: Sequence[Tensor]) -> list[Any] | None:
        """Return a buffer with the elements of all parts, one part for each rank. Return None without parts."""
        return carried(self.keep(joined(parts)), sizes(parts)) if parts else None

    def received(self, tensor: Tensor, counts: list[int] | None = None, *, filled: bool = False) -> list[Any]:
        """Return a buffer for the final content of `tensor`: the tensor's own memory if it is contiguous."""
        whole = tensor.detach()
        if not whole.is_contiguous():
            whole = whole.contiguous() if filled else torch.empty(tensor.shape, dtype=tensor.dtype)
            self.at_end(lambda: tensor.detach().copy_(whole))
        return carried(self.keep(whole), counts)

    def received_parts(self, parts: Sequence[Tensor]) -> list[Any] | None:
        """Return a buffer for the final content of all parts, one part from each rank. Return None without parts."""
        if not parts:
            return None
        whole = self.keep(parts[0].new_empty(sum(sizes(parts))))
        pieces = whole.split(sizes(parts))
        self.at_end(lambda: [part.detach().copy_(piece.view(part.shape)) for part, piece in zip(parts, pieces)])
        return carried(whole, sizes(parts))

    def keep(self, tensor: Tensor) -> Tensor:
        self._used.append(tensor)
        return tensor

    # --- the end

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self in self._unfinished:
            mpi.complete(self._requests, what=f"MPI: {self._what}", timeout=timeout or self._timeout)
            self._finish()
        return True

    def is_completed(self) -> bool:
        if self in self._unfinished and mpi.library().Request.Testall(self._requests):
            self._finish()
        return self not in self._unfinished

    is_success = is_completed

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> Future[list[Tensor]]:
        """Return a completed future. No thread of this class could complete it while the caller computes."""
        self.wait()
        future: Future[list[Tensor]] = Future()
        future.set_result(self._result)
        return future

    def _finish(self) -> None:
        self._unfinished.discard(self)
        with torch.no_grad():
            for act in self._last:
                act()
        self._requests, self._used, self._last = [], [], []


NAME = "mpi4py"  # torch keeps the name mpi for its own backend, even in builds without it


def problems(*, num_processes: int, only_sums: bool) -> list[str]:
    """Return why a run of this many processes cannot use this back end. `only_sums`: they only sum and broadcast."""
    if num_processes > 1 and not Mpirun().started():
        what = f"backend: mpi, but mpirun did not start these {num_processes} processes"
        return [f"{what} (mpirun -n {num_processes} python train.py ..., without launch.nproc_per_node)"]
    if num_processes > 1 and not only_sums and torch.__version__ < "2.13":
        what = f"backend: mpi, which can only sum and broadcast with torch {torch.__version__} (2.13 and later: any message)"
        return [f"{what}; gloo, or parallel=ddp or zero"]
    return []


def _new_group(options: Any, _: object) -> Any:
    """Make a group with its own communicator, so that its operations pair with no other group's. All members must call this.

    A group of one rank does not start MPI: without mpirun, MPI would leave files.
    """
    if options.group_size == 1:
        return dist.ProcessGroupGloo(options.store, 0, 1, options.timeout)
    world, _ = mpi.world()
    ranks = options.global_ranks_in_group or range(world.size)
    return MPIGroup(world.Create_group(world.group.Incl(list(ranks))), name=options.group_id, timeout=options.timeout)


class MPIGroup(dist.ProcessGroup):
    """The collectives of a torch.distributed group, on CPU tensors, with MPI's non-blocking operations.

    There is no thread: the caller starts an operation, and its `wait` ends it. So each rank's operations on a communicator
    start in the order of the calls. This order is the same on all ranks, and no lock or queue can change it.
    """

    def __init__(self, communicator: Any, *, name: str, timeout: timedelta) -> None:
        # the stub does not have this form
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self._communicator, self._name, self._timeout = communicator, name, timeout

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # the name is torch's
        return NAME

    def _begin(self, what: str, result: Sequence[Tensor]) -> PendingOperation:
        for tensor in result:
            if tensor.device.type != "cpu":
                raise ValueError(f"{what} of a tensor on {tensor.device}: the group over mpi4py takes tensors on the CPU")
        return PendingOperation(f"{what} among {self.size()} ranks", timeout=self._timeout, result=list(result))

    # --- reductions

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        work = self._begin("all-reduce", tensors)
        for tensor in tensors:
            reduction = Reduction(opts.reduceOp, dtype=tensor.dtype, size=self.size())
            whole = work.keep(reduction.staged(tensor.detach()))
            work.add(self._communicator.Iallreduce(mpi.library().IN_PLACE, reduction.buffer(whole), op=reduction.operation))
            work.at_end(partial(reduction.put, whole, into=tensor.detach()))
        return work

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        work = self._begin("reduce", tensors)
        (tensor,), root = tensors, opts.rootRank
        reduction = Reduction(opts.reduceOp, dtype=tensor.dtype, size=self.size())
        whole = work.keep(reduction.staged(tensor.detach()))
        buffers: tuple[Any, Any] = reduction.buffer(whole), None
        if self.rank() == root:
            buffers = mpi.library().IN_PLACE, reduction.buffer(whole)
            work.at_end(partial(reduction.put, whole, into=tensor.detach()))
        return work.add(self._communicator.Ireduce(*buffers, op=reduction.operation, root=root))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        sources = [joined(parts) for parts in inputs]
        return self._reduce_scatter(outputs, sources, [sizes(parts) for parts in inputs], opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any) -> dist.Work:
        return self._reduce_scatter(outputs, sources, [[output.numel()] * self.size() for output in outputs], opts)

    def _reduce_scatter(self, outputs: list[Tensor], sources: list[Tensor], counts: list[list[int]], opts: Any) -> dist.Work:
        work = self._begin("reduce-scatter", outputs)
        for output, source, counted in zip(outputs, sources, counts):
            check_count(source, sum(counted))
            reduction = Reduction(opts.reduceOp, dtype=output.dtype, size=self.size())
            sent = work.keep(reduction.staged(source.detach()))
            mine = work.keep(sent.new_empty(output.numel()))
            buffers = reduction.buffer(sent), reduction.buffer(mine)
            work.add(self._communicator.Ireduce_scatter(*buffers, recvcounts=counted, op=reduction.operation))
            work.at_end(partial(reduction.put, mine, into=output.detach()))
        return work

    # --- moves

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        work = self._begin("broadcast", tensors)
        for tensor in tensors:
            work.add(self._communicator.Ibcast(work.received(tensor, filled=True), root=opts.rootRank))
        return work

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        work = self._begin("all-gather", [tensor for parts in outputs for tensor in parts])
        for parts, tensor in zip(outputs, inputs):
            check_count(tensor, parts[self.rank()].numel())
            work.add(self._communicator.Iallgatherv(work.sent(tensor), work.received_parts(parts)))
        return work

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Gather several tensors: `outputs[rank][i]` is that rank's `inputs[i]`."""
        return self.allgather([list(parts) for parts in zip(*outputs)], inputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        work = self._begin("all-gather", outputs)
        for output, tensor in zip(outputs, inputs):
            check_count(output, tensor.numel() * self.size())
            counts = [tensor.numel()] * self.size()
            work.add(self._communicator.Iallgatherv(work.sent(tensor), work.received(output, counts)))
        return work

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        parts = outputs[0] if self.rank() == opts.rootRank else []
        work = self._begin("gather", parts)
        return work.add(self._communicator.Igatherv(work.sent(inputs[0]), work.received_parts(parts), root=opts.rootRank))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        work = self._begin("scatter", outputs)
        parts = inputs[0] if self.rank() == opts.rootRank else []
        return work.add(self._communicator.Iscatterv(work.sent_parts(parts), work.received(outputs[0]), root=opts.rootRank))

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        work = self._begin("all-to-all", [output])
        sent = work.sent(source, counts_of(source, input_splits, size=self.size()))
        received = work.received(output, counts_of(output, output_splits, size=self.size()))
        return work.add(self._communicator.Ialltoallv(sent, received))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        work = self._begin("all-to-all", outputs)
        return work.add(self._communicator.Ialltoallv(work.sent_parts(inputs), work.received_parts(outputs)))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        work = self._begin("send", tensors)
        for tensor in tensors:
            work.add(self._communicator.Isend(work.sent(tensor), dest=to, tag=tag))
        return work

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        work = self._begin("receive", tensors)
        for tensor in tensors:
            work.add(self._communicator.Irecv(work.received(tensor), source=source, tag=tag))
        return work

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._begin("barrier", []).add(self._communicator.Ibarrier())


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _new_group, extended_api=True, devices=["cpu"])
