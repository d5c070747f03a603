"""FSDP2: parameters, gradients and optimizer state are sharded over the processes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from typing_extensions import NotRequired, TypedDict, Unpack

from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import Engine, EngineAround, Step
from framework.engine.sums import Sums
from framework.modules.parts import blocks_of, description, separate
from framework.modules.tensors import map_tensors
from framework.parallel.dealing import dealing
from framework.parallel.first_weights import fill, fills
from framework.parallel.gathered_types import Types
from framework.parallel.trail import Trail
from framework.runtime.exits import Unfit
from framework.runtime.log import LOGGER
from framework.runtime.torch_compiler import import_dynamo
from framework.runtime.torch_internals import is_view

import_dynamo()  # else each worker does this at its first operation on shards; now the workers inherit it from their parent

REMEDIES = ({"reshard_after_forward": False},)  # options that let some models run which cannot run without them


class ShardOptions(TypedDict):
    """The options of FSDP2."""

    reshard_after_forward: bool
    param_dtype: Literal["bf16", "fp16", "fp32"] | None
    reduce_dtype: Literal["bf16", "fp16", "fp32"] | None
    reduce_every: NotRequired[Literal["micro_batch"] | None]
    prefetch: NotRequired[int | None]


class Offloading(ShardOptions):
    """The options of FSDP2 for a model without cut layers."""

    cpu_offload: bool


@fills
def fsdp(model: nn.Module, *, world: World, forward: Forward, shard: int | None, **options: Unpack[Offloading]) -> Engine:
    """Shard the model block by block; the parameters of one block are gathered at a time. Collective."""
    return sharded(model, mesh=world.mesh(shard=shard), world=world, forward=forward, **typed(model, forward, options))


def typed(model: nn.Module, forward: Forward, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a strategy's options for `sharded`, with types instead of their names. Call this before layers are cut."""
    chosen = {name: options[name] for name in ("param_dtype", "reduce_dtype")}
    others = {name: value for name, value in options.items() if name not in chosen}
    return others | {"types": Types.of(model, forward=forward, **chosen)}


def problems(model: nn.Module, *, prefetch: int | None = None, **options: object) -> list[str]:
    """Return why this model cannot be sharded."""
    if prefetch is not None and prefetch < 1:
        return [f"parallel.prefetch: {prefetch} is not a number of blocks; take 1 or more, or null for the default of torch"]
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            return [f"the model's {name} is a number without dimensions, which FSDP cannot shard; give it the shape (1,), "
                    "or take ddp or zero"]  # fmt: skip
        if not parameter.is_contiguous():
            return [f"the model's {name} is not contiguous in memory, which FSDP cannot shard; call contiguous() before it "
                    "becomes a parameter, or take ddp or zero"]  # fmt: skip
    return []


def exact_options(**options: object) -> dict[str, object]:
    """Return the options with which this strategy computes the same as one process."""
    return options | {"param_dtype": None, "reduce_dtype": None}


def sharded(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    world: World,
    forward: Forward,
    types: Types,
    reshard_after_forward: bool,
    cpu_offload: bool = False,
    reduce_every: Literal["micro_batch"] | None = None,
    prefetch: int | None = None,
) -> Engine:
    """Shard each block and the rest of the model over the mesh's `shard` axis; replicate over a `replicate` axis. Collective.

    `types` are the types of the model before layers were cut. Ranks along a `tensor` axis, over which the layers are already
    cut, work on the same samples. With `reduce_every`, gradients are sharded after each micro-batch, else after the last one;
    until then a process holds the gradients of the whole model. `prefetch` is the number of blocks that are gathered ahead.
    None is torch's default: one block in the backward pass; in the forward pass, the blocks that the CPU has reached.
    """
    is_cut = "tensor" in (mesh.mesh_dim_names or ())
    num_parts, over = (mesh["tensor"].size(), mesh["shard"]) if is_cut else (1, mesh)
    offload = CPUOffloadPolicy(pin_memory=world.device.type != "cpu") if cpu_offload else OffloadPolicy()
    # blocks that share a weight are gathered together with the rest of the model
    units = separate(blocks_of(model), model)
    if world.rank == 0:
        LOGGER.info("gathered at a time: %s%s", description(units, model), f"; {types.note}" if types.note else "")
    for block in [*units, model]:
        frees = reshard_after_forward and block is not model  # the backward pass starts with the rest of the model
        for unit, policy in types.policies(block, model):
            copy_views(unit)
            fully_shard(unit, mesh=over, reshard_after_forward=frees, mp_policy=policy, offload_policy=offload)
    fill(model, device=world.device, parameters_on=torch.device("cpu") if cpu_offload else None)
    without_averages(model)
    reshard_after_evaluation(model)
    trail = Trail([*units, model], model)
    assert isinstance(model, FSDPModule)
    # a task's own step may differentiate the model before its last backward pass, and then needs the same weights again
    keeps = forward.trains_by_step and not reshard_after_forward
    model.set_reshard_after_backward(not keeps)
    if prefetch is not None:
        prefetch_blocks(units, num_ahead=prefetch)
    engine = DataParallelEngine(
        model,
        forward=forward,
        mesh=mesh,
        dp_rank=world.rank // num_parts,  # `tensor` is the last axis of the mesh
        dp_size=world.world_size // num_parts,
        averaged_over=1,
        is_counted=world.rank % num_parts == 0,
        set_sync=model.set_requires_gradient_sync if reduce_every is None else model.set_requires_all_reduce,
        broadcast=world.broadcast,
        make_optimizer=dealing(world),
        finish=partial(end_step, model, trail) if keeps else trail.end_step,
        trail=lambda: trail.number,
        data_group=over.get_group() if is_cut else None,
        forget=partial(reshard, model),
    )
    return FreesWeights(engine) if forward.trains_by_step and reshard_after_forward else engine


class FreesWeights(EngineAround):
    """An Engine for a task's own step that says why the step cannot differentiate the model twice."""

    def forward_backward(self, step: Step, *, index: int, loss_scale: float, measure: bool) -> Sums:
        try:
            return self._engine.forward_backward(step, index=index, loss_scale=loss_scale, measure=measure)
        except RuntimeError as error:
            if "setStorage" not in str(error):
                raise
            what = "the task's step differentiates the model itself, which frees the gathered weights that the loss still needs"
            raise Unfit(f"parallel.reshard_after_forward: true, but {what} (false)") from error


def prefetch_blocks(blocks: Sequence[nn.Module], *, num_ahead: int) -> None:
    """Let each sharded block start to gather the next blocks: in list order forward, in reverse order backward."""
    for ordered, name in ((blocks, "set_modules_to_forward_prefetch"), (blocks[::-1], "set_modules_to_backward_prefetch")):
        for number, block in enumerate(ordered):
            getattr(block, name)(list(ordered[number + 1 : number + 1 + num_ahead]))


def without_averages(model: nn.Module) -> None:
    """Let FSDP sum the gradients over the ranks. (FSDP itself would average them.)"""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports only sums


def copy_views(module: nn.Module) -> None:
    """Let a module return no views. Call this before the module is sharded.

    A change in place of a view that a sharded module has returned would remove the hook that gathers the weights for the
    backward pass. The gradients would then be wrong, without a message.
    """

    def copied(_: nn.Module, __: object, outputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return outputs
        return map_tensors(lambda tensor: tensor.clone() if tensor.requires_grad and is_view(tensor) else tensor, outputs)

    module.register_forward_hook(copied)


def reshard_after_evaluation(model: nn.Module) -> None:
    """Free the gathered parameters after a forward pass without gradients.

    Without a backward pass nothing else frees them. The next forward pass would use the old values although the shards have
    changed, for example after an evaluation of the averaged weights.
    """

    model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else reshard(model))


def end_step(model: nn.Module, trail: Trail) -> None:
    """Free the parameters that a step has kept gathered, and note which weights have a gradient."""
    reshard(model)
    trail.end_step()


def reshard(model: nn.Module) -> None:
    """Free all gathered parameters. A backward pass that needs them gathers them again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
