"""DistributedDataParallel: every process holds the whole model; gradients are summed over processes."""

from typing import Any, Literal

import torch._dynamo  # noqa: F401  # DDP's constructor imports it: here, workers inherit it from their warm parent
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.optim.optimizers import MakeOptimizer
from framework.parallel.compression import register
from framework.parallel.invariant import invariant
from framework.runtime.exits import Unfit

__all__ = ["ddp", "replicated", "invariant"]


def ddp(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    bucket_cap_mb: int,
    gradient_as_bucket_view: bool,
    static_graph: bool,
    find_unused_parameters: bool,
    compression: Literal["fp16", "bf16", "powersgd", "int8", "top_k"] | None,
) -> Engine:
    """Replicate the model. Collective."""
    return replicated(
        model,
        world=world,
        forward=forward,
        mesh=world.mesh(replicate=replicate),
        compression=compression,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
    )


def replicated(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    mesh: DeviceMesh,
    make_optimizer: MakeOptimizer | None = None,
    compression: str | None = None,
    **options: Any,
) -> Engine:
    """Return the Engine of a model that every rank of the world holds whole. `options` are DDP's own. Collective.

    With several devices in a process, the model lies on them already.
    """
    is_on_one = len(world.devices) == 1
    if is_on_one:
        model.to(world.device)
    wrapper = DistributedDataParallel(
        model,
        device_ids=[world.device] if is_on_one and world.device.type == "cuda" else None,
        forward_sync_buffers=False,  # the buffers follow micro-batch 0 (DataParallelEngine)
        **options,
    )
    if compression is not None:
        register(wrapper, compression, group=wrapper.process_group)

    def set_sync(last: bool) -> None:
        wrapper.require_backward_grad_sync = last  # what DDP.no_sync() sets, without a context for each micro-batch

    def run(*given: Any, **named: Any) -> Any:
        try:
            return wrapper(*given, **named)
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
            raise Unfit(f"parallel.find_unused_parameters: false, but the model's forward does not use {_some(unused)} in every "
                        "step (true, at a small cost; or freeze what is not used)") from None  # fmt: skip

    return DataParallelEngine(
        model,
        model=run,
        forward=forward,
        mesh=mesh,
        dp_rank=world.rank,
        dp_size=world.world_size,
        set_sync=set_sync,
        broadcast=world.broadcast,
        make_optimizer=make_optimizer,
        # The reducer lays its buckets out anew after the first backward pass, and the layout decides in which order
        # a ring sums: a run that is resumed would take its first step in another order than one that was not.
        num_warm_ups=2,
    )


def _some(names: list[str]) -> str:
    return (
        ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "every parameter"
    )
