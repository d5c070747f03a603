"""Three axes: the stages of a pipeline, sharded by FSDP2, with layers that tensor parallelism cuts."""

from functools import partial
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from framework.distributed.world import World
from framework.engine.forward import Forward
from framework.engine.seam import Demands, Engine
from framework.modules.parts import chain_of, separate
from framework.parallel import fsdp
from framework.parallel import pipeline as pipelines
from framework.parallel import tensor as tensors
from framework.parallel.first_weights import fills
from framework.parallel.fsdp_tensor import ignore_known
from framework.parallel.gathered_types import Types
from framework.parallel.pipelining.chain import Stage
from framework.parallel.pipelining.engine import PipelineEngine
from framework.parallel.pipelining.sent import SendDtype
from framework.parallel.pipelining.times import Balance
from framework.parallel.vocabulary import stays_cut


@fills
def pipeline_fsdp_tensor(
    model: nn.Module,
    *,
    world: World,
    forward: Forward,
    pipeline: int | None,
    shard: int | None,
    tensor: int | None,
    schedule: Literal["gpipe", "1f1b"],
    reshard_after_forward: bool,
    send_dtype: SendDtype = None,
    balance: Balance = "operations",
) -> Engine:
    """Cut the model into stages (first axis), shard each stage (middle axis), and cut its layers (last axis). Collective."""
    ignore_known()
    mesh = world.mesh(pipeline=pipeline, shard=shard, tensor=tensor)
    num_parts = mesh["tensor"].size()
    styles = tensors.styles_of(model, num_parts=num_parts, keeps_cut=stays_cut(forward.task)) if num_parts > 1 else {}
    styles = tensors.even(styles, model, num_parts=num_parts)  # FSDP shards only parts of equal size
    types = Types.of(model, forward=forward)
    shard_stage = partial(
        cut_and_shard, model, styles=styles, mesh=mesh, reshard_after_forward=reshard_after_forward, types=types
    )
    return PipelineEngine(
        model,
        mesh=mesh,
        world=world,
        forward=forward,
        schedule=schedule,
        send_dtype=send_dtype,
        balance=balance,
        shard_stage=shard_stage,
    )


def problems(model: nn.Module, *, demands: Demands, tensor: int, **others: Any) -> list[str]:
    """Return why this model cannot be cut in this way."""
    if chain_of(model) is None:
        return [f"{type(model).__name__} does not have chain(), which lists the modules that, one after the other, are its "
                "forward: only these can be sharded; ddp, zero, fsdp and hsdp take most models, ddp+pp some"]  # fmt: skip
    found = pipelines.problems(model, demands=demands, **others) or fsdp.problems(model)
    return found or (tensors.problems(model, tensor=tensor, sequence=False) if tensor > 1 else [])


exact_options = pipelines.exact_options  # the model is cut as in `pipeline`


def cut_and_shard(
    model: nn.Module,
    stage: Stage,
    *,
    styles: dict[str, ParallelStyle],
    mesh: DeviceMesh,
    reshard_after_forward: bool,
    types: Types,
) -> None:
    """Shard this process's stage; layers that `styles` names are also cut over the `tensor` axis. Collective.

    One link is gathered at a time. Links that share a weight are gathered together with the rest of the stage.
    """
    inside = set(stage.modules())
    weights = {
        id(parameter) for parameter in nn.Module.parameters(stage)
    }  # a layer of another stage may have these weights too
    here = {name for name, layer in model.named_modules()
            if layer in inside or any(id(p) in weights for p in nn.Module.parameters(layer, recurse=False))}  # fmt: skip
    cut = {name: style for name, style in styles.items() if name in here}
    parallelize_module(model, mesh["tensor"], cut)
    tensors.own_outputs(model, cut)
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # the modules and names of each weight
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    for part in [*separate(list(stage.links), model), stage]:
        for unit, policy in types.policies(part, model):
            fsdp.copy_views(unit)
            fully_shard(unit, mesh=mesh["shard"], reshard_after_forward=reshard_after_forward, mp_policy=policy)
    fsdp.without_averages(stage)
    fsdp.reshard_after_evaluation(stage)
    for several in places.values():  # a link of another stage stays in the model if it has a name of the weight
        holder, name = next((module, name) for module, name in several if module in inside)
        for module, alias in several:
            if module not in inside:
                setattr(module, alias, getattr(holder, name))
