"""Expert parallelism: each process has its own samples and some experts of each layer; all processes send tokens to them."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from framework.distributed.world import World
from framework.engine.data_parallel import DataParallelEngine
from framework.engine.forward import Forward
from framework.engine.seam import Engine
from framework.modules.parts import choices_of, experts_of
from framework.modules.trace import traced
from framework.parallel.ddp import sum_gradients
from framework.parallel.first_weights import fill, fills
from framework.parallel.routing.exchange import by_owner
from framework.parallel.routing.part import fault_of
from framework.runtime.torch_compiler import import_dynamo

import_dynamo()  # as in fsdp.py


@fills
def expert(model: nn.Module, *, world: World, forward: Forward, replicate: int | None, expert: int | None) -> Engine:
    """Divide each layer's experts along the inner axis of the mesh; every process has the rest of the model. Collective.

    Gradients of experts are summed over the outer axis only: an expert's owner already has the part of the inner axis's tokens.
    Source: Lepikhin et al. 2020, "GShard"; Fedus et al. 2021, "Switch Transformers".
    """
    mesh = world.mesh(replicate=replicate, expert=expert)
    cut_experts(model, mesh=mesh)
    fill(model, device=world.device)
    trained = [p for p in nn.Module.parameters(model) if p.requires_grad]

    def finish() -> None:
        sum_gradients([p for p in trained if not isinstance(p, DTensor)])
        sum_gradients([p for p in trained if isinstance(p, DTensor)], group=mesh.get_group("replicate"))

    return DataParallelEngine(
        model,
        forward=forward,
        mesh=mesh,
        dp_rank=world.rank,
        dp_size=world.world_size,
        averaged_over=1,
        broadcast=world.broadcast,
        finish=finish,
    )


def problems(model: nn.Module, **options: object) -> list[str]:
    """Return why this model's experts cannot be divided over several processes."""
    most_models = "or take ddp, zero, fsdp or hsdp, which take most models"
    modules, trace = experts_of(model), traced(model)
    if not modules:
        return [f"{type(model).__name__} calls no known module of stacked experts, with parameters (num_experts, ...), "
                "which maps tokens (N, D), indices (N, K) and weights (N, K); experts() or model.parts.experts lists them, "
                f"{most_models}"]  # fmt: skip
    kinds = {(type(module), *(tuple(p.shape) for p in nn.Module.parameters(module))): module for module in modules}
    faults = [fault_of(module, choices_of(module, trace)) for module in kinds.values()]
    if fault := next(filter(None, faults), None):
        return [f"{fault}; each process must run some of the experts; {most_models}"]
    read = trace.read_elsewhere() if trace is not None else set()
    name = next((name for module in modules for name, p in module.named_parameters() if id(p) in read), None)
    return [f"an expert's {name} is used outside of the module that has it; {most_models}"] if name else []


def cut_experts(model: nn.Module, *, mesh: DeviceMesh) -> None:
    """Leave each rank its part of every stack of experts, and let their modules send tokens. Not collective."""
    modules = experts_of(model)
    stacked = {id(p): p for module in modules for p in nn.Module.parameters(module)}
    placements = [Replicate(), Shard(0)]
    cut = {
        key: nn.Parameter(distribute_tensor(p.detach(), mesh, placements, src_data_rank=None), requires_grad=p.requires_grad)
        for key, p in stacked.items()
    }
    for module in modules:
        for name, parameter in module.named_parameters():
            setattr(module, name, cut[id(parameter)])
        # compiled code ends before the module and starts again after it: its communication is not part of a graph
        module.forward = torch.compiler.disable(by_owner(module, group=mesh.get_group("expert")))  # type: ignore[method-assign]
