"""The names of torch that are not public or that differ between releases. Only the compiler's names are in another file.

`tests/test_torch_internals.py` has a canary for each name, which fails if a release removes the name.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import ExceptionWrapper
from torch.distributed import distributed_c10d
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils import signal_handling, worker

# --- modules

DROPOUTS = nn.modules.dropout._DropoutNd
BATCH_NORMS = nn.modules.batchnorm._BatchNorm
# forward functions that, in training, change their buffers and do not read them
UNREAD_STATISTICS = {BATCH_NORMS.forward, nn.SyncBatchNorm.forward, nn.modules.instancenorm._InstanceNorm.forward}
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
REDISTRIBUTION_LOG = "torch.distributed.tensor._redistribute"


def apply_to_own(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace a module's own parameters and buffers, but not its children's. (`to` also replaces the children's.)"""
    module._apply(change, recurse=False)


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert parameters and buffers of the default type, real or complex, to this type. Do not convert other types."""
    kinds = {torch.get_default_dtype(): dtype, torch.get_default_dtype().to_complex(): dtype.to_complex()}
    return module._apply(lambda tensor: tensor.to(kinds.get(tensor.dtype, tensor.dtype)))


# --- tensors


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Overwrite many tensors, with one call for each pair of types and devices. Torch would copy a mixture one by one."""
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources):
        ours, theirs = kinds.setdefault((target.dtype, target.device, source.dtype, source.device), ([], []))
        ours.append(target)
        theirs.append(source)
    for ours, theirs in kinds.values():
        torch._foreach_copy_(ours, theirs)


def move_all_towards(targets: Sequence[Tensor], sources: Sequence[Tensor], *, share: float) -> None:
    """Move many tensors towards other tensors, in place. `share` is the fraction of the distance."""
    torch._foreach_lerp_(list(targets), list(sources), share)


def shard_offsets(shard: Any) -> tuple[int, ...]:
    """Return where this rank's part of a DTensor begins in the whole tensor, in each dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)[1]


def check_on_device(holds: Tensor, message: str) -> None:
    """Raise an error unless `holds`, shape (), is true; a GPU raises it when it gets there, so that nothing waits."""
    torch._assert_async(holds, message)


def multiply_all(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply many tensors by a factor, in place."""
    torch._foreach_mul_(list(tensors), factor)


def is_of_functorch(tensor: Tensor) -> bool:
    """Return whether a tensor stands for several, or for one and its derivative, within a transform of torch.func."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with each in-place change."""
    return tensor._version


def same_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Return a context in which autograd does not see changes of these tensors. At its end they must have their old values."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def without_modes() -> AbstractContextManager[None]:
    """Return a context that hides its operations from the active modes, such as a mode that notes writes."""
    return _disable_current_modes()


def is_view(tensor: Tensor) -> bool:
    return tensor._is_view()


def is_of(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Return whether a tensor is one of the other tensors, or a view of one of them."""
    return any(tensor is other or tensor._base is other for other in others)


def stand_ins() -> AbstractContextManager[Any]:
    """Return a context in which new tensors have a shape, a type and a device, but no storage. Autocast works on them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


# --- process groups


def set_group_timeout(timeout: timedelta) -> None:
    """Set the time-out of the groups of a mesh. Torch gives them half an hour, and has no argument for the time-out."""
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout + NCCL_LATER


NCCL_LATER = timedelta(minutes=1)  # NCCL's watchdog aborts the process; other ranks must report before which rank hangs


def without_buffer_sync() -> dict[str, bool]:
    """Return the DDP option that does not sync buffers: `forward_sync_buffers` since 2.13, `broadcast_buffers` before."""
    names = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


# --- loader processes


def report_what_cannot_be_sent() -> None:
    """In a loader process, make the reader raise the reason why a batch cannot be sent. Otherwise the reader waits forever.

    Only the thread of the queue sees the reason: an object that cannot be pickled, or too many open files.
    """

    def put_error(queue: "Queue[Any]", error: BaseException, item: tuple[int, Any]) -> None:
        fault = (type(error), error, error.__traceback__)
        queue.put((item[0], ExceptionWrapper(fault, where="sending a batch from a loader process")))

    Queue._on_queue_feeder_error = put_error  # type: ignore[attr-defined]


def forget_loader_process() -> None:
    """In a loader process, let a dataset yield all of its samples: `get_worker_info()` tells it to yield a part."""
    worker._worker_info = None


def shut_down_loader(steps: Any) -> None:
    """End the processes of a DataLoader's iterator, as the iterator's __del__ does, or by force."""
    steps._shutdown_workers()
    for process in steps._workers:
        if process.is_alive():  # it ignores SIGTERM
            process.kill()


def kill_loader(steps: Any) -> None:
    """End the processes of a DataLoader's iterator by force, even if they do not react."""
    signal_handling._remove_worker_pids(id(steps))  # otherwise torch's signal handler would raise an error
    steps._worker_pids_set = False
    for process in steps._workers:
        process.kill()
    steps._shutdown_workers()


# --- torch elastic's rendezvous


class RoundView(NamedTuple):
    """The nodes of a rendezvous, by the addresses that they have given themselves."""

    number: int  # the number of the round
    is_running: bool
    members: list[str]  # in the order of their ranks
    num_waiting: int
    alive: list[str]  # nodes with a recent heartbeat


class DynamicRendezvous(DynamicRendezvousHandler):
    """The rendezvous behind torchrun, for nodes that join and leave."""

    def use_store(self, store: dist.Store, host: str, port: int) -> None:
        """Give the workers the address of an existing store. Otherwise the first node of a round serves another store.

        Torch would name the caller of each operation in an event that nobody reads, and for this it inspects the stack and all
        modules: a joining node would be too slow, for up to minutes, to change the record between two heartbeats of the others.
        """
        for one in (self, self._op_executor, self._state_holder):
            one._record = lambda *_, **__: None  # type: ignore[method-assign, assignment, union-attr, misc]
        self._bootstrap_store_info = RendezvousStoreInfo(host, port)
        self._shared_tcp_store_server = store

    def look(self, *, is_new: bool = True) -> RoundView:
        """Return the nodes that have a heartbeat. If not `is_new`, return the nodes that this node has seen last."""
        if is_new:
            self.num_nodes_waiting()
        with self._heartbeat_lock:
            state = self._state_holder.state
            members, alive = ([node.addr for node in sorted(nodes)] for nodes in (state.participants, state.last_heartbeats))
            return RoundView(state.round, state.complete, members, len(state.wait_list), alive)

    def end_heartbeats(self) -> None:
        """End the thread of this node's heartbeats. An interpreter that ends during its request to the store would abort."""
        self._stop_heartbeats()


# --- stacks

BACKWARD_FUNCTION = "_engine_run_backward"  # the innermost function while gradients are computed


# --- pipelines


def greet_others_only(stage: Any, *, rank: int) -> None:
    """Let a stage open its connections to other ranks only: before torch 2.12, neighbours on one rank send to themselves.

    `rank` is this rank in the stage's group. gloo has no connection of a rank to itself.
    """
    if torch.__version__ >= "2.12":
        return
    greetings = stage._get_init_p2p_neighbors_ops
    stage._get_init_p2p_neighbors_ops = lambda: [one for one in greetings() if one.group_peer != rank]


def actions_of(schedule: Any) -> dict[int, list[tuple[str, int, int]]]:
    """Return each process's actions in a schedule of several stages: type of computation, stage, micro-batch."""
    return {
        rank: [
            (part.computation_type.name, part.stage_index, part.microbatch_index)
            for action in row
            if action is not None
            for part in action.sub_actions or (action,)  # a forward pass and a backward pass that may run at the same time
        ]
        for rank, row in schedule.pipeline_order.items()
    }
