"""Pipeline parallelism: the model's layers are cut into stages, one or more for each process; micro-batches go through them."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from framework.engine.seam import Demands
from framework.modules.parts import chain_of
from framework.parallel.pipelining.chain import Stage, stray_parameters, weighty
from framework.parallel.pipelining.own_forward import OwnForward, Uncut
from framework.parallel.pipelining.schedules import KINDS
from framework.parallel.shard import ShardOptions, shard_model
from framework.parallel.tensor import cut_by


def problems(model: nn.Module, *, demands: Demands, pipeline: int, schedule: str, **others: object) -> list[str]:
    """Return why this model cannot be cut into so many stages, or why the run cannot use these stages."""
    most_models = "ddp, zero, fsdp and hsdp take most models"
    if demands.own_step:
        return [f"pipeline: runs a model once for each micro-batch, but the task has its own step; {most_models}"]
    num_stages = pipeline * KINDS[schedule].stages_per_rank
    links = chain_of(model)
    if links is None and others.get("shard", 1) != 1 and KINDS[schedule].stages_per_rank > 1:
        return [f"parallel.schedule: {schedule}, which puts two stages on a process, but {type(model).__name__} does not have "
                "chain(): two stages of its own forward cannot be sharded apart (gpipe or 1f1b)"]  # fmt: skip
    if links is None:
        return _own_forward_problems(model, num_stages=num_stages, most_models=most_models)
    if stray := stray_parameters(model, links):
        return [f"{type(model).__name__}.chain() leaves out {stray[0]}, which is in none of its modules; {most_models}"]
    uses = Counter(module for link in links for module in link.modules() if any(True for _ in module.buffers(recurse=False)))
    if shared := [module for module, count in uses.items() if count > 1]:
        return [f"{type(model).__name__}.chain() has a {type(shared[0]).__name__} in two of its modules, and several "
                f"processes would change its buffers; {most_models}"]  # fmt: skip
    if num_stages > len(weighty(links)):
        return [f"pipeline={pipeline}: makes {num_stages} stages with schedule={schedule}, and the model's chain has "
                f"{len(weighty(links))} modules with weights; take fewer, or another strategy: {most_models}"]  # fmt: skip
    return []


def _own_forward_problems(model: nn.Module, *, num_stages: int, most_models: str) -> list[str]:
    """Return why a model that does not list its modules cannot be cut at its blocks."""
    try:
        chain = OwnForward(model)
    except Uncut as error:
        return [f"{type(model).__name__} does not have chain(), which lists the modules of its forward in their order, "
                f"and its forward cannot be cut at its blocks: {error}; add chain() to the model, or take another strategy: "
                f"{most_models}"]  # fmt: skip
    if num_stages > len(chain.blocks):
        return [f"pipeline: {num_stages} stages, but {type(model).__name__} has {len(chain.blocks)} block"
                f"{'s' * (len(chain.blocks) != 1)}; take fewer, or another strategy: {most_models}"]  # fmt: skip
    return []


def cut_and_shard(
    model: nn.Module, stage: Stage, *, styles: Mapping[str, ParallelStyle], tensor: DeviceMesh | None, mesh: DeviceMesh | None,
    on: torch.device, options: ShardOptions,
) -> None:  # fmt: skip
    """Cut the layers of this process's stage that `styles` names over `tensor`, and shard the stage over `mesh`. Collective.

    One link is gathered at a time. Links that share a weight are gathered together with the rest of the stage.
    """
    inside = set(stage.modules())
    weights = {id(p) for p in nn.Module.parameters(stage)}  # a layer of another stage may have these weights too
    here = {name for name, layer in model.named_modules()
            if layer in inside or any(id(p) in weights for p in nn.Module.parameters(layer, recurse=False))}  # fmt: skip
    cut = {name: style for name, style in styles.items() if name in here}
    if tensor is not None:
        cut_by(cut, model, mesh=tensor)
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # the modules and names of each weight
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    if mesh is not None:
        shard_model(stage, list(stage.links), mesh=mesh, whole=model, on=on, options=options)
    for several in places.values():  # a link of another stage stays in the model if it has a name of the weight
        holder, name = next(((module, name) for module, name in several if module in inside), several[0])
        for module, alias in several:
            if module not in inside:
                setattr(module, alias, getattr(holder, name))
