"""torch.distributed.rpc among the ranks of a world: the ranks join through the run's own store, and leave together."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

from framework.distributed.world import World

Gradients = list[Tensor | None]

_SCHEME = "steadfast"
_ENDED: "Future[None]" = Future()  # done when this process leaves: rank 0 waits for it, to notice a process that dies
_SERVED: list[Any] = []  # rank 0's objects: RPC calls functions by name, and these functions find the objects here
_WORLD: list[World] = []  # that this process has joined


def name_of(rank: int) -> str:
    return f"rank{rank}"


def join_rpc(world: World, *, lost: Callable[[int, Exception], None] | None = None) -> None:
    """Let this rank answer the calls of the other ranks until the world ends. Collective; a process may join several times.

    Rank 0 calls `lost`, from another thread, with a rank that has died and the error of RPC. RPC unpickles received data,
    and a pickle can run any program: so a run on one machine listens only to this machine. Between machines it uses gloo's
    network.
    """
    if not _WORLD:
        _join(world)
    world.agreement.barrier()  # every rank has the objects that it serves
    if world.rank == 0 and lost is not None:
        for rank in range(1, world.world_size):
            call = rpc.rpc_async(name_of(rank), _until_its_end, timeout=0)  # 0: no timeout
            call.add_done_callback(partial(_report_loss, rank=rank, lost=lost))


def _join(world: World) -> None:
    network = "lo" if world.world_size == world.local_world_size else os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if network:
        os.environ.setdefault("TP_SOCKET_IFNAME", network)

    def rendezvous(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield world.groups.store("rpc"), world.rank, world.world_size

    dist.register_rendezvous_handler(_SCHEME, rendezvous)  # no port of its own, and a new store for every attempt
    timeout_s = world.timeout.total_seconds()
    num_threads = max(2, world.world_size)  # handlers wait at most for a lock, not for each other
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://", rpc_timeout=timeout_s, num_worker_threads=num_threads,
        _transports=["uv"], _channels=["basic"],  # the transports by shared memory poll, and use a third of a core per process
    )  # fmt: skip
    with warnings.catch_warnings():
        # a warning of torch about the group that init_rpc makes for itself
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        rpc.init_rpc(name_of(world.rank), rank=world.rank, world_size=world.world_size, rpc_backend_options=options)
    world.groups.at_end(leave=partial(_leave, timeout_s=timeout_s), abandon=partial(rpc.shutdown, graceful=False))
    _WORLD.append(world)


def _leave(*, timeout_s: float) -> None:
    _ENDED.set_result(None)
    rpc.shutdown(timeout=timeout_s)


@rpc.functions.async_execution
def _until_its_end() -> "Future[None]":
    return _ENDED


def _report_loss(call: "Future[None]", *, rank: int, lost: Callable[[int, Exception], None]) -> None:
    try:
        call.value()
    except Exception as error:
        lost(rank, as_gloo_says(error))


def new_server() -> int:
    """Return the number of a new object of rank 0. Every rank calls this, in the same order."""
    _SERVED.append(None)
    return len(_SERVED) - 1


def serve(server: Any, *, number: int) -> None:
    """Let the other ranks call the methods of this object. Call it on rank 0."""
    _SERVED[number] = server


def call_remote(number: int, method: str, *arguments: Any) -> Any:
    """Call a method of rank 0's object with this number, in rank 0's process, and return its result.

    If the method returns a future, no thread of rank 0 waits for it.
    """
    try:
        return rpc.rpc_sync(name_of(0), _run, args=(number, method, arguments))
    except RuntimeError as error:
        raise as_gloo_says(error) from error


def as_gloo_says(error: Exception) -> Exception:
    """Return an error of RPC in words that the framework knows, if a rank has ended or is late; else the error itself."""
    if any(text in str(error) for text in _LOST):
        return ConnectionError(f"Connection closed by peer: {error}")
    return TimeoutError(f"{error} (launch.timeout_s)") if "RPC ran for more than set timeout" in str(error) else error


_LOST = ("EOF: end of file", "ECONNRESET", "ECONNREFUSED", "EPIPE", "pipe closed")


@rpc.functions.async_execution
def _run(number: int, method: str, arguments: tuple[Any, ...]) -> "Future[Any]":
    result = getattr(_SERVED[number], method)(*arguments)
    if isinstance(result, Future):
        return result
    done: Future[Any] = Future()
    done.set_result(result)
    return done


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy that can be sent: later changes of `tensor` do not change the copy."""
    return tensor.detach().to("cpu", copy=True)


def gradients_of(parameters: Iterable[nn.Parameter]) -> Gradients:
    """Return the gradients, on the CPU, so that they can be sent."""
    return [None if p.grad is None else p.grad.to("cpu") for p in parameters]
