"""All exact strategies: the degrees of one mesh, and why they may not fit a model or a run."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from typing_extensions import Unpack

from framework.distributed.mesh import MESH_AXES
from framework.distributed.world import World
from framework.engine.engine import Engine
from framework.engine.forward import Forward
from framework.engine.seam import Demands
from framework.modules.trace import example_of
from framework.parallel import context as contexts
from framework.parallel import expert as experts
from framework.parallel import pipeline as pipelines
from framework.parallel import replica, shard, tensor, zero
from framework.parallel.invariant import invariant
from framework.parallel.layout import OF_AXES, Layout, Options
from framework.parallel.model_parallel import place
from framework.runtime.log import LOGGER

_INEXACT = ("hook", "param_dtype", "reduce_dtype", "send_dtype")  # they round or change sums; framework/config/identity.py too
_CUTS = ("shard", "expert", "tensor", "pipeline")  # ranks along them hold a part of the model


def parallelize(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    pipeline: int | None = 1,
    replicate: int | None = 1,
    shard: int | None = 1,
    expert: int | None = 1,
    context: int | None = 1,
    tensor: int | None = 1,
    bitwise: int | None = None,
    **options: Unpack[Options],
) -> Engine:
    """Put a model on a mesh with these degrees of parallelism, one of which may be None: it takes the rest. Collective.

    `replicate`: replicas of the model, with other samples. `shard`: parameters, gradients and optimizer state are sharded
    (FSDP2), with other samples. `expert`: each rank has some of the experts, with other samples. `context`: each rank has some
    tokens of the same samples. `tensor`: each rank has a part of each layer, with the same samples. `pipeline`: each rank has
    some of the layers. With `bitwise`, the gradients of micro-batches of that size are summed along a tree.
    """
    asked = {
        "pipeline": pipeline,
        "replicate": replicate,
        "shard": shard,
        "expert": expert,
        "context": context,
        "tensor": tensor,
    }
    degrees = {axis: asked[axis] for axis in MESH_AXES if asked[axis] != 1}
    if bitwise is not None:
        owned = zero.owned(world) if options.get("zero") else None
        return invariant(model, world=world, forward=forward, micro_batch_size=bitwise, make_optimizer=owned)
    if "num_devices" in options:
        layout = place(model, devices=world.devices, example=example_of(model))
        if world.rank == 0:
            LOGGER.info("parallel: in each process %s", layout)
    elif not degrees:
        model.to(world.device)
    if not degrees:
        return Engine(module=model, forward=forward)
    return Layout(model, world=world, forward=forward, mesh=world.mesh(**degrees), options=options).engine()


def fills(node: Mapping[str, Any]) -> bool:
    """Return whether the ranks hold parts of the model: then rank 0 sends them, and the others need no whole model."""
    return any(node.get(axis, 1) != 1 for axis in _CUTS)


def problems(model: nn.Module, *, demands: Demands, **options: Any) -> list[str]:
    """Return why these degrees do not fit each other, the run, or the sizes of this model."""
    axes = [axis for axis in MESH_AXES if options.get(axis, 1) != 1]
    found = _unused(options) + _apart(options, demands)
    if "replicate" in options:
        found += replica.problems(demands=demands, hook=options.get("hook"))
        found += zero.problems(demands=demands) if options.get("zero") else []
    if "expert" in axes:
        found += experts.problems(model, shard=options.get("shard", 1))
    if "context" in options:
        found += contexts.problems(model, demands=demands, context=options["context"])
    if "pipeline" in axes:
        found += pipelines.problems(model, demands=demands, **options)
    if "shard" in axes:
        holds_scalars = "pipeline" not in axes and not options.get("cpu_offload")
        found += shard.problems(model, prefetch=options.get("prefetch"), holds_scalars=holds_scalars)
    if "tensor" in axes:
        found += tensor.problems(model, tensor=options["tensor"], sequence=options.get("sequence"))
    return found


def _unused(options: Mapping[str, Any]) -> list[str]:
    """Refuse an option of an axis that the mesh does not have."""
    lines = list[str]()
    for axis, names in OF_AXES.items():
        for name in names if axis not in options else ():
            if options.get(name) not in (None, False):
                lines.append(f"parallel.{name}: {options[name]}, but the mesh has no axis {axis} (parallel.{axis}=2)")
    return lines


def _apart(options: Mapping[str, Any], demands: Demands) -> list[str]:
    """Refuse degrees that do not go together."""
    given = {axis for axis in MESH_AXES if axis in options}
    if demands.bitwise and given - {"replicate"}:
        return ["invariance: bitwise, but this strategy sums in a different order (parallel=single, ddp or zero, or "
                "invariance=samples)"]  # fmt: skip
    for one, other in (("expert", "tensor"), ("expert", "pipeline")):
        if min(options.get(one, 1), options.get(other, 1)) > 1:
            return [f"parallel.{one}: {options[one]}, but it cannot be combined with parallel.{other}={options[other]} (1)"]
    if "num_devices" in options and given - {"replicate"}:
        axis = next(axis for axis in MESH_AXES if axis in given - {"replicate"})
        return [f"parallel.{axis}: {options[axis]}, but a model on several devices of a process can only be replicated (1)"]
    if options.get("zero") and given - {"replicate", "context"}:
        return ["parallel.zero: true, but the optimizer state is divided with the model already (false)"]
    if options.get("cpu_offload") and {"tensor", "pipeline"} & given:
        return ["parallel.cpu_offload: true, but the model's layers are cut, and their parts stay on the devices (false)"]
    return []


def exact_options(**options: object) -> dict[str, object]:
    """Return the options with which the strategy computes the same as one process."""
    return options | {name: None for name in _INEXACT if name in options}


def remedies(**options: Any) -> list[dict[str, Any]]:
    """Return options that let some models run which cannot run without them."""
    whole = [{"sequence": False}] if "tensor" in options and options.get("sequence") is not False else []
    if "shard" in options:
        return [*whole, {"reshard_after_forward": False}]
    return [*whole, {"find_unused_parameters": True}] if "replicate" in options else whole
