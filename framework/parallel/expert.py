"""Expert parallelism: each process has some experts of each layer; all processes send tokens to them."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from framework.modules.parts import experts_of
from framework.parallel.exchange import by_owner
from framework.runtime.torch_compiler import import_dynamo

import_dynamo()  # as in shard.py


def problems(model: nn.Module, *, shard: int = 1) -> list[str]:
    """Return why this model's experts cannot be divided over several processes, and each expert sharded over `shard`."""
    modules = experts_of(model)
    if not modules:
        return [f"{type(model).__name__} calls no known module of stacked experts, with parameters (num_experts, ...), "
                "which maps tokens (N, D), indices (N, K) and weights (N, K); experts() or model.parts.experts lists them, "
                "or take ddp, zero, fsdp or hsdp, which take most models"]  # fmt: skip
    for module in modules:
        own = dict(module.named_parameters(recurse=False))
        every = [*nn.Module.parameters(module), *module.buffers()]
        if len(own) < len(every) or len({p.shape[:1] for p in own.values()}) != 1:
            return [f"{type(module).__name__} has tensors that are not stacked by its experts, (num_experts, ...), in the "
                    "module itself; each process must run some of the experts; or take ddp, zero, fsdp or hsdp, which take "
                    "most models"]  # fmt: skip
        for name, parameter in own.items():  # FSDP shards the second dim, and only evenly
            if shard > 1 and (parameter.ndim < 2 or parameter.shape[1] % shard):
                size = f"has the shape {list(parameter.shape)}, and shard={shard} does not divide its second dim"
                return [f"the experts' {name} {size}; take a divisor, or expert without shard"]
    return []


def cut_experts(model: nn.Module, *, mesh: DeviceMesh) -> None:
    """Leave each rank of the mesh's one axis its part of every stack of experts, and let their modules send tokens.

    The gradients of an expert are those of all ranks along this axis already. Not collective.
    Source: Lepikhin et al. 2020, "GShard"; Fedus et al. 2021, "Switch Transformers".
    """
    modules = experts_of(model)
    stacked = {id(p): p for module in modules for p in nn.Module.parameters(module)}
    cut = {
        key: nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None), requires_grad=p.requires_grad)
        for key, p in stacked.items()
    }
    for module in modules:
        for name, parameter in module.named_parameters():
            setattr(module, name, cut[id(parameter)])
        # compiled code ends before the module and starts again after it: its communication is not part of a graph
        module.forward = torch.compiler.disable(by_owner(module, group=mesh.get_group()))  # type: ignore[method-assign]
