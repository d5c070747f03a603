"""DistributedDataParallel: every process holds the whole model; gradients are summed over processes."""

from functools import partial
from typing import Any, TypedDict

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import Demands, Engine
from framework.optim.optimizers import MakeOptimizer
from framework.parallel.compression import Name, register
from framework.parallel.invariant import invariant
from framework.runtime.exits import Unfit
from framework.runtime.torch_internals import import_dynamo, set_gradient_sync, without_buffer_sync

import_dynamo()  # here, so that workers inherit it from their warm parent


class Buckets(TypedDict):
    """How gradients are packed into messages: DistributedDataParallel's own arguments."""

    bucket_cap_mb: int
    gradient_as_bucket_view: bool


class DDPOptions(Buckets):
    """All of DistributedDataParallel's own arguments that a user can set."""

    static_graph: bool
    find_unused_parameters: bool


def ddp(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    compression: Name | None,
    bitwise: int | None = None,
    **options: Unpack[DDPOptions],
) -> Engine:
    """Replicate the model; with `bitwise`, sum the gradients of micro-batches of that size along a tree. Collective."""
    if bitwise is not None:
        return invariant(model, world=world, forward=forward, micro_batch_size=bitwise)
    mesh = world.mesh(replicate=replicate)
    return replicated(model, world=world, forward=forward, mesh=mesh, compression=compression, **options)


def problems(model: nn.Module, *, demands: Demands, compression: str | None = None, **others: object) -> list[str]:
    """Return what a run asks for that compressed gradients exclude."""
    if compression is None:
        return []
    found = []
    if demands.bitwise:
        why = "which depends on how many processes there are (invariance=bitwise)"
        found.append(f"parallel.compression: {compression}, {why} (null)")
    if demands.recovers and compression in ("int8", "top_k", "powersgd"):
        found.append(f"trainer.divergence.action: {demands.recovers}, but parallel.compression={compression} keeps what was "
                     "not finite for later steps (raise, or parallel.compression=null, fp16 or bf16)")  # fmt: skip
    return found


def replicated(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    mesh: DeviceMesh,
    make_optimizer: MakeOptimizer | None = None,
    compression: Name | None = None,
    **options: Any,
) -> Engine:
    """Return the Engine of a model that every rank holds whole. `options` are DistributedDataParallel's own. Collective.

    If a process has several devices, the model must be on them already.
    """
    is_on_one = len(world.devices) == 1
    if is_on_one:
        model.to(world.device)
    wrapper = DistributedDataParallel(
        model,
        device_ids=[world.device] if is_on_one and world.device.type == "cuda" else None,
        **without_buffer_sync(),  # type: ignore[arg-type]  # the buffers follow micro-batch 0 (DataParallelEngine)
        **options,
    )
    if compression is not None:
        register(wrapper, compression, group=wrapper.process_group)

    def run(*given: Any, **named: Any) -> Any:
        try:
            return wrapper(*given, **named)
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
            some = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "") or "every parameter"
            raise Unfit(f"parallel.find_unused_parameters: false, but the model's forward does not use {some} in "
                        "every step (true, at a small cost; or freeze what is not used)") from None  # fmt: skip

    return DataParallelEngine(
        model,
        model=run,
        forward=forward,
        mesh=mesh,
        dp_rank=world.rank,
        dp_size=world.world_size,
        set_sync=partial(set_gradient_sync, wrapper),
        broadcast=world.broadcast,
        make_optimizer=make_optimizer,
        # The reducer lays out its buckets again after the first backward pass, and the layout decides in which order
        # a ring sums: without warm-up, the first step after a resume would be summed in another order.
        num_warm_ups=2,
    )
