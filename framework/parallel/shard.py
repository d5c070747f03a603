"""FSDP2: parameters, gradients and optimizer state are sharded over the processes."""

import logging
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from typing_extensions import TypedDict

from framework.modules.parts import separate
from framework.modules.tensors import map_tensors
from framework.runtime.torch_compiler import import_dynamo
from framework.runtime.torch_internals import BATCH_NORMS, REDISTRIBUTION_LOG, is_view

import_dynamo()  # else each worker does this at its first operation on shards; now the workers inherit it from their parent

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}


class ShardOptions(TypedDict, total=False):
    """The options of FSDP2. `reduce_every`: gradients are sharded after each micro-batch, not only after the last one.

    Until then a process holds the gradients of the whole model. `prefetch` is the number of blocks that are gathered ahead.
    None is torch's default: one block in the backward pass; in the forward pass, the blocks that the CPU has reached.
    """

    reshard_after_forward: bool
    param_dtype: Literal["bf16", "fp16", "fp32"] | None
    reduce_dtype: Literal["bf16", "fp16", "fp32"] | None
    reduce_every: Literal["micro_batch"] | None
    prefetch: int | None
    cpu_offload: bool


def scalars_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters without dimensions: FSDP cannot shard them, so each process holds them."""
    return [parameter for parameter in nn.Module.parameters(model) if parameter.ndim == 0]


def problems(model: nn.Module, *, prefetch: int | None = None, holds_scalars: bool = True) -> list[str]:
    """Return why this model cannot be sharded. `holds_scalars`: the other options allow parameters that are not sharded."""
    if prefetch is not None and prefetch < 1:
        return [f"parallel.prefetch: {prefetch} is not a number of blocks; take 1 or more, or null for the default of torch"]
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 and not holds_scalars:
            return [f"the model's {name} is a number without dimensions, which FSDP can shard neither in a pipeline nor with "
                    "parallel.cpu_offload; give it the shape (1,), or take fsdp, ddp or zero"]  # fmt: skip
        if not parameter.is_contiguous():
            return [f"the model's {name} is not contiguous in memory, which FSDP cannot shard; call contiguous() before it "
                    "becomes a parameter, or take ddp or zero"]  # fmt: skip
    return []


def shard_model(
    model: nn.Module, units: Sequence[nn.Module], *, mesh: DeviceMesh, whole: nn.Module, experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None, on: torch.device, options: ShardOptions,
) -> None:  # fmt: skip
    """Shard each unit, and the rest of the model, over the mesh: with two axes, replicate over the first. Not collective.

    Units that share a weight with other modules of `whole` are gathered together with the rest. `experts` are sharded over
    `expert_mesh`, without the axis over which they are already divided. Gradients are summed.
    """
    ignore_known()
    computed, summed = _DTYPES[options.get("param_dtype")], _DTYPES[options.get("reduce_dtype")]
    offload = CPUOffloadPolicy(pin_memory=on.type != "cpu") if options.get("cpu_offload") else OffloadPolicy()
    plain, policy = MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=summed)
    scalars = set(scalars_of(whole))
    for module in experts:
        copy_views(module)
        fully_shard(module, mesh=expert_mesh, mp_policy=policy, offload_policy=offload, shard_placement_fn=lambda _: Shard(1))
    for unit in [*separate([unit for unit in units if unit not in experts], whole), model]:
        # running statistics in 16 bits would not change
        norms = [m for m in unit.modules() if isinstance(m, BATCH_NORMS) and m is not unit] if computed else []
        for part in [*(norm for norm in norms if not isinstance(norm, FSDPModule)), unit]:
            copy_views(part)
            frees = options.get("reshard_after_forward", True) and part is not model  # the backward pass starts with the rest
            fully_shard(part, mesh=mesh, reshard_after_forward=frees, offload_policy=offload, ignored_params=scalars,
                        mp_policy=plain if part in norms else policy)  # fmt: skip
    without_averages(model)
    reshard_after_evaluation(model)
    if (num_ahead := options.get("prefetch")) is not None:
        prefetch_blocks([unit for unit in units if isinstance(unit, FSDPModule)], num_ahead=num_ahead)


def ignore_known() -> None:
    """Silence, on every rank, the warnings that torch prints for all shards over two axes."""
    # a gathered output is a view of a DTensor; no code changes it in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    # a norm is summed over one axis, then over the other; all processes use the same order
    logging.getLogger(REDISTRIBUTION_LOG).setLevel(logging.ERROR)


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


def reshard(model: nn.Module) -> None:
    """Free all gathered parameters. A backward pass that needs them gathers them again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# --- the blocks that ranks run


_BITS = 52  # so that a float64 holds the number


class Trail:
    """What this rank has done since its start, as a number: the order of its blocks' calls, and the weights with gradients.

    FSDP pairs the messages of the ranks by their order. If ranks call other blocks, or have gradients of other weights, and the
    sizes happen to be equal, then the gathered weights or the summed gradients are wrong, without a message.
    """

    def __init__(self, units: Sequence[nn.Module], model: nn.Module) -> None:
        self.number = 0
        self._parameters = [p for p in nn.Module.parameters(model) if p.requires_grad]
        for place, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._called, place))

    def _called(self, place: int, *_: object) -> None:
        self._add(place)

    def end_step(self) -> None:
        """Note which weights have a gradient. Call it after a step's last backward pass."""
        self._add(hash(tuple(p.grad is not None for p in self._parameters)))

    def _add(self, value: int) -> None:
        self.number = hash((self.number, value)) % 2**_BITS
