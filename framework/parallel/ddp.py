"""DistributedDataParallel: every process holds the whole model; the gradients are summed over the processes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import torch
import torch.distributed as dist
from annotated_types import Ge
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from framework.distributed.buckets import sum_all
from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import Demands, Engine
from framework.modules.tensors import local
from framework.optim.optimizers import MakeOptimizer
from framework.optim.update import gradient_or_zeros
from framework.parallel.bucket_size import DEFAULT_MB, Hook, MeasuredBuckets, Replica
from framework.parallel.dealing import dealing
from framework.parallel.invariant import invariant
from framework.runtime.exits import Unfit

REMEDIES = ({"find_unused_parameters": True},)  # options that let some models run which cannot run without them


class Buckets(TypedDict):
    """The arguments of DistributedDataParallel that decide how gradients are packed into messages."""

    bucket_cap_mb: int
    gradient_as_bucket_view: bool


class ReducerOptions(TypedDict):
    """The arguments of DistributedDataParallel that a user can set, except the bucket size."""

    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool


class DDPOptions(ReducerOptions):
    """All arguments of DistributedDataParallel that a user can set."""

    bucket_cap_mb: int


def ddp(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    replicate: int | None,
    bucket_cap_mb: Annotated[int, Ge(1)] | Literal["auto"],
    hook: Hook | None = None,
    bitwise: int | None = None,
    **options: Unpack[ReducerOptions],
) -> Engine:
    """Replicate the model; with `bitwise`, sum the gradients of micro-batches of that size along a tree. Collective."""
    if bitwise is not None:
        return invariant(model, world=world, forward=forward, micro_batch_size=bitwise)
    mesh = world.mesh(replicate=replicate)
    size = None if bucket_cap_mb == "auto" else bucket_cap_mb
    return replicated(model, world=world, forward=forward, mesh=mesh, hook=hook, bucket_cap_mb=size, **options)


def problems(
    model: nn.Module, *, demands: Demands, hook: Mapping[str, Any] | None = None, bucket_cap_mb: int | str = 1, **others: object
) -> list[str]:
    """Return which demands of the run do not fit gradients that a hook sums."""
    if hook is None:
        return []
    if not isinstance(hook, Mapping):
        return [f"hook={hook}: is not a component (hook._target_=MODULE.FUNCTION hook._partial_=true)"]
    found, name = list[str](), hook["_target_"]
    if keeps_state(hook):
        if bucket_cap_mb == "auto":
            found.append(f"bucket_cap_mb=auto: runs test steps, and parallel.hook ({name}) would keep their state (a number)")
        kept = {"checkpoint.every": demands.checkpoint_every, "checkpoint.keep_best": demands.keep_best or None}
        why = f"but parallel.hook ({name}) keeps values from step to step that no checkpoint holds"
        found += [f"{key}: {asked}, {why} (null or 0: it is saved at its end)" for key, asked in kept.items() if asked]
        if demands.recovers:
            found.append(f"trainer.divergence.action: {demands.recovers}, but parallel.hook ({name}) keeps values that are not "
                         "finite for later steps (raise, or a function as the hook)")  # fmt: skip
    if demands.own_step:
        found.append(f"parallel.hook: {name}, but a task's own step cannot use it (null)")
    if demands.bitwise:
        found.append(f"parallel.hook: {name}, but its result depends on the number of processes (invariance=samples, or null)")
    return found


def keeps_state(hook: object) -> bool:
    """Return whether a hook, or a hook's node, keeps values between steps. Only a partial function keeps none."""
    return not hook.get("_partial_") if isinstance(hook, Mapping) else not isinstance(hook, partial)


class SavedAtEnd:
    """A part of the loop for a strategy with values that no checkpoint holds: the run is saved only at its end."""

    def can_save(self, loop: Any) -> bool:
        return bool(loop.is_ending)


def exact_options(**options: object) -> dict[str, object]:
    """Return the options with which this strategy computes the same as one process."""
    return options | {"hook": None}


def replicated(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    mesh: DeviceMesh,
    make_optimizer: MakeOptimizer | None = None,
    hook: Hook | None = None,
    bucket_cap_mb: int | None,
    **options: Any,
) -> Engine:
    """Return the Engine of a model that every rank holds whole. `options` are arguments of DistributedDataParallel. Collective.

    Without `bucket_cap_mb`, the engine measures the best bucket size. `hook` averages the gradients instead of summing them.
    If a process has several devices, the model must already be on them.
    """
    if len(world.devices) == 1:
        model.to(world.device)
    if forward.trains_by_step:  # DDP needs one forward pass for each backward pass, and every weight used in it
        return DataParallelEngine(
            model,
            forward=forward,
            mesh=mesh,
            dp_rank=world.rank,
            dp_size=world.world_size,
            averaged_over=1,
            broadcast=world.broadcast,
            make_optimizer=make_optimizer or dealing(world),
            finish=partial(sum_gradients, [p for p in nn.Module.parameters(model) if p.requires_grad]),
        )
    replica = Replica(model, hook=hook, bucket_cap_mb=bucket_cap_mb or DEFAULT_MB, options=options)
    trained_by_name = {name: p for name, p in model.named_parameters() if p.requires_grad}
    engine = DataParallelEngine(
        model,
        model=replica,
        forward=forward,
        mesh=mesh,
        dp_rank=world.rank,
        dp_size=world.world_size,
        averaged_over=1 if hook is None else world.world_size,
        set_sync=replica.set_sync,
        broadcast=world.broadcast,
        make_optimizer=make_optimizer or dealing(world),
        warm_up=replica.settle,
        parts={"hook": SavedAtEnd()} if hook is not None and keeps_state(hook) else {},
        finish=(lambda: None) if options.get("find_unused_parameters") else partial(require_gradients, trained_by_name),
    )
    return MeasuredBuckets(engine, replica, world=world, forward=forward) if bucket_cap_mb is None else engine


def require_gradients(parameters: dict[str, nn.Parameter]) -> None:
    """Raise Unfit if a parameter has no gradient: the reducer waits for it and has not summed the gradients of its bucket."""
    if unused := [name for name, parameter in parameters.items() if parameter.grad is None]:
        some = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        raise Unfit(f"parallel.find_unused_parameters: false, but the model's forward does not use {some} in "
                    "every step (true, at a small cost; or freeze the unused parameters)")  # fmt: skip


def sum_gradients(parameters: Sequence[nn.Parameter], *, group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients over the ranks of the group (None: all ranks); of a shard, this rank's part. Collective.

    A gradient that only some ranks have counts as zero on the other ranks.
    """
    if not parameters:
        return
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    sum_all((local(gradient_or_zeros(p)) for p, is_used in zip(parameters, used.tolist()) if is_used), group=group)
